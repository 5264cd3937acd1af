//! TUN devices and UDP sockets with their offloads, for one thread with its own epoll loop.
//!
//! All descriptors are nonblocking. A [`Tun`] moves raw frames: virtio header and packet, TCP
//! superpackets of up to 64 KiB included. A [`PathSocket`] sends runs of equal datagrams with one
//! call (UDP_SEGMENT) and receives them coalesced (UDP_GRO) into a [`RecvBatch`]. Where the
//! kernel refuses an offload, the data at hand goes out without it, in the same call. A
//! [`Poller`] waits for them, for [`Waker`]s and for a deadline in nanoseconds.
//!
//! A [`PacketSender`] sends whole packets by the ordinary route, and a [`PacketEar`] hears some as they come in.
//!
//! Nothing here locks, and after the set-up nothing allocates.

mod clock;
mod fallback;
mod memory;
mod netlink;
mod packets;
mod poll;
mod priority;
mod tun;
mod udp;

pub use clock::{LocalTime, boottime_ns, is_clock_synchronized, local_time};
pub use memory::give_back_large_blocks;
pub use packets::{PacketEar, PacketSender};
pub use poll::{Event, Interest, Poller, Waker, precise_timers};
pub use priority::{niceness, set_niceness};
pub use tun::{FRAME_MAX, Tun, TunCounters};
pub use udp::{
    Endpoint, Family, PathSocket, RECV_BATCH, Received, RecvBatch, SendOutcome, Stop, UdpCounters,
};

use std::io;

/// A device or socket could not be set up.
#[derive(Debug, thiserror::Error)]
#[error("{operation} ({target}): {error}")]
pub struct SetupError {
    /// The operation that the system refused, such as `SO_BINDTODEVICE`.
    pub operation: &'static str,
    /// Target that it was done to: an interface, an address.
    pub target: String,
    /// The system's answer. No `source`: the message has it, and who prints the chain would say it twice.
    pub error: io::Error,
}

impl SetupError {
    /// For `map_err`: names what failed, and on what.
    fn at(operation: &'static str, target: impl ToString) -> impl FnOnce(io::Error) -> Self {
        move |error| Self {
            operation,
            target: target.to_string(),
            error,
        }
    }
}
