//! Connections: their queues of segments to send, their fields, what is built from what arrives.

pub mod clamp;
pub mod conn;
pub mod dropped;
pub mod fields;
pub mod inject;
pub mod latest;
pub mod queue;
pub mod resume;
