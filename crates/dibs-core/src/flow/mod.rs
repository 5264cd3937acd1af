//! Connections: their queues of segments to send, their fields, what is built from what arrives.

pub mod ack_floor;
pub mod conn;
pub mod dropped;
pub mod echo_filter;
pub mod inject;
pub mod numbers;
pub mod queue;
pub mod schedule;
pub mod tsval_floor;
pub mod window_clamp;
