//! Receiving runs of datagrams into buffers that are used again and again.

use super::UdpCounters;
use super::message::{Control, NAME_LEN, Name};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Runs taken by one call: few enough to be worked on while they are in the cache.
pub const RECV_BATCH: usize = 4;
/// Room for one run: no more fits an IP packet.
const RUN_MAX: usize = 1 << 16;

/// Datagrams of one sender, of equal length but for the last, in one buffer.
#[derive(Debug, PartialEq, Eq)]
pub struct Received<'a> {
    /// The sender.
    pub remote: SocketAddr,
    /// The address that it wrote to, and that answers should come from.
    pub local: Option<IpAddr>,
    /// A router has marked them for congestion (CE).
    pub marked: bool,
    /// The datagrams, one after the other; they may be changed in place.
    pub bytes: &'a mut [u8],
    /// Length of each datagram but the last; never 0.
    pub stride: usize,
}

impl Received<'_> {
    /// The datagrams one by one. An empty datagram yields nothing.
    pub fn datagrams(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.bytes.chunks_mut(self.stride)
    }
}

/// Buffers for one receive call, and what it brought; one serves all sockets of a thread.
pub struct RecvBatch {
    buffers: Box<[u8]>,
    runs: [Option<Run>; RECV_BATCH],
}

/// What is known of the buffer with the same index.
#[derive(Clone, Copy)]
struct Run {
    remote: SocketAddr,
    local: Option<IpAddr>,
    marked: bool,
    len: usize,
    stride: usize,
}

impl Default for RecvBatch {
    fn default() -> Self {
        Self::new()
    }
}

impl RecvBatch {
    /// Takes its quarter MiB once and for all.
    pub fn new() -> Self {
        Self {
            buffers: vec![0; RECV_BATCH * RUN_MAX].into_boxed_slice(),
            runs: [None; RECV_BATCH],
        }
    }

    /// Datagrams of the last receive, in order of arrival.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = Received<'_>> {
        self.buffers
            .chunks_exact_mut(RUN_MAX)
            .zip(&self.runs)
            .filter_map(|(buffer, run)| {
                run.map(|run| Received {
                    remote: run.remote,
                    local: run.local,
                    marked: run.marked,
                    bytes: &mut buffer[..run.len],
                    stride: run.stride,
                })
            })
    }

    /// recvmmsg(2). An ICMP error of the past may be reported once in place of data
    /// (ECONNREFUSED and its like); the call is then repeated.
    pub(super) fn fill(
        &mut self,
        fd: BorrowedFd<'_>,
        counters: &mut UdpCounters,
    ) -> io::Result<()> {
        self.runs = [None; RECV_BATCH];
        self.fill_once(fd, counters)
            .or_else(|error| match error.raw_os_error() {
                Some(libc::ECONNREFUSED | libc::EHOSTUNREACH | libc::ENETUNREACH | libc::EINTR) => {
                    self.fill_once(fd, counters)
                }
                _ => Err(error),
            })
    }

    #[allow(unsafe_code)]
    fn fill_once(&mut self, fd: BorrowedFd<'_>, counters: &mut UdpCounters) -> io::Result<()> {
        let mut names = [Name::EMPTY; RECV_BATCH];
        let mut controls = [Control::EMPTY; RECV_BATCH];
        let mut data = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; RECV_BATCH];
        // SAFETY: all bits zero is a valid mmsghdr: null pointers and lengths of 0.
        let mut messages: [libc::mmsghdr; RECV_BATCH] = unsafe { std::mem::zeroed() };
        let buffers = self.buffers.chunks_exact_mut(RUN_MAX);
        let places = buffers.zip(&mut names).zip(&mut controls).zip(&mut data);
        for ((((buffer, name), control), data), message) in places.zip(&mut messages) {
            data.iov_base = buffer.as_mut_ptr().cast();
            data.iov_len = buffer.len();
            let header = &mut message.msg_hdr;
            header.msg_name = name.as_mut_ptr();
            header.msg_namelen = NAME_LEN as libc::socklen_t;
            header.msg_iov = data;
            header.msg_iovlen = 1;
            header.msg_control = control.as_mut_ptr();
            header.msg_controllen = super::message::CONTROL_LEN as _;
        }
        // SAFETY: each message points to a buffer, name and control area of its own with its true
        // length, all of which outlive the call; no timeout is given.
        let count = unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                messages.as_mut_ptr(),
                RECV_BATCH as libc::c_uint,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for (index, message) in messages[..count].iter().enumerate() {
            let cut = libc::MSG_TRUNC | libc::MSG_CTRUNC;
            let (Some(remote), 0) = (names[index].address(), message.msg_hdr.msg_flags & cut)
            else {
                // Without all of its ancillary data a run cannot be taken apart.
                counters.truncated += 1;
                continue;
            };
            let ancillary = controls[index].received(message.msg_hdr.msg_controllen as _);
            if let Some(overflowed) = ancillary.overflowed {
                counters.overflowed = overflowed.into();
            }
            let len = message.msg_len as usize;
            let stride = ancillary.stride.unwrap_or(len).max(1);
            self.runs[index] = Some(Run {
                remote,
                local: ancillary.local,
                marked: ancillary.marked,
                len,
                stride,
            });
        }
        Ok(())
    }
}
