"""What tests of Pulque, and of programs that use it, stand on: a clock and a disk to turn."""
