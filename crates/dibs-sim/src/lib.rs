//! Two dibs cores, TCP endpoints and seeded links in virtual time.

pub mod emulator;
