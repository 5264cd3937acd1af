//! Sending runs of datagrams, as one or singly.

use super::message::{Control, Name};
use super::{Endpoint, UdpSocket};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Segments that the kernel takes in one call (UDP_MAX_SEGMENTS of old kernels; 128 since 6.9).
const SEGMENTS_MAX: usize = 64;
/// Largest payload of one UDP packet over IPv4, segmented afterwards or not.
const PAYLOAD_MAX: usize = 65_507;

/// How far a send came.
#[derive(Debug)]
pub struct SendOutcome {
    /// Bytes that the kernel took: whole datagrams from the front of the batch.
    pub sent: usize,
    /// Why it took no more; `None` if it took all.
    pub stop: Option<Stop>,
}

/// Why the kernel took no more datagrams.
#[derive(Debug)]
pub enum Stop {
    /// The send buffer is full (EAGAIN), or memory is short (ENOBUFS, ENOMEM): later.
    Blocked,
    /// The next datagram, of `size` bytes, is larger than the interface's MTU allows. Those after
    /// it have not been tried.
    TooBig {
        /// Its payload in bytes.
        size: usize,
    },
    /// The path cannot send now: no route, no device, link down, forbidden.
    Path(io::Error),
}

impl SendOutcome {
    /// Sorts an error number; `size` is the length of the datagram that met it.
    pub(super) fn stopped(sent: usize, errno: i32, size: usize) -> Self {
        let stop = match errno {
            libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM => Stop::Blocked,
            libc::EMSGSIZE => Stop::TooBig { size },
            _ => Stop::Path(io::Error::from_raw_os_error(errno)),
        };
        Self {
            sent,
            stop: Some(stop),
        }
    }
}

/// The kernel refused the first message: its error number.
struct Refusal(i32);

/// How a piece of a batch is handed over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// One message, which the kernel cuts into datagrams.
    Run,
    /// A message for each datagram.
    Single,
}

impl UdpSocket {
    pub(super) fn send(&mut self, to: Endpoint, batch: &[u8], segment: usize) -> SendOutcome {
        assert!(segment > 0, "datagrams have a length");
        let run = (PAYLOAD_MAX / segment).clamp(1, SEGMENTS_MAX) * segment;
        let mut sent = 0;
        while sent < batch.len() {
            let rest = &batch[sent..];
            let piece = &rest[..rest.len().min(run)];
            let result = match piece.len() > segment {
                true => self.send_run(to, piece, segment),
                false => self.submit(to, piece, segment, Form::Single),
            };
            match result {
                Ok(bytes) => sent += bytes,
                Err(Refusal(errno)) => {
                    return SendOutcome::stopped(sent, errno, piece.len().min(segment));
                }
            }
        }
        SendOutcome { sent, stop: None }
    }

    /// Several datagrams: as one if the kernel takes them so, otherwise the same ones singly.
    ///
    /// It refuses with EIO where the device cannot do checksums (before 6.11) or the route is
    /// IPsec, with EINVAL for faults of devices and options, and with EMSGSIZE where a segment
    /// is longer than the route's MTU, though a single datagram passes in fragments.
    fn send_run(&mut self, to: Endpoint, piece: &[u8], segment: usize) -> Result<usize, Refusal> {
        let mut refused = false;
        if self.gso.wanted() {
            match self.submit(to, piece, segment, Form::Run) {
                Ok(bytes) => {
                    self.gso.accepted();
                    self.counters.gso_sends += 1;
                    return Ok(bytes);
                }
                Err(Refusal(libc::EIO | libc::EINVAL | libc::EMSGSIZE)) => refused = true,
                Err(refusal) => return Err(refusal),
            }
        }
        let bytes = self.submit(to, piece, segment, Form::Single)?;
        self.counters.sent_singly += bytes.div_ceil(segment) as u64;
        if refused {
            // Only now is it known that the offload was at fault and not the path.
            self.gso.refused();
            self.counters.gso_refused += 1;
        }
        Ok(bytes)
    }

    /// Hands over a piece; returns the bytes taken, at least one datagram.
    fn submit(
        &mut self,
        to: Endpoint,
        piece: &[u8],
        segment: usize,
        form: Form,
    ) -> Result<usize, Refusal> {
        match self.submit_once(&to, piece, segment, form) {
            // An ICMP error of the past, reported once; says nothing about this datagram.
            Err(Refusal(libc::ECONNREFUSED)) => self.submit_once(&to, piece, segment, form),
            // How the kernel says, among others, that it does not have our address (any more).
            Err(Refusal(libc::EINVAL | libc::ENETUNREACH | libc::EADDRNOTAVAIL))
                if to.local.is_some() =>
            {
                let to = Endpoint { local: None, ..to };
                let result = self.submit_once(&to, piece, segment, form);
                self.counters.local_lost += u64::from(result.is_ok());
                result
            }
            result => result,
        }
    }

    fn submit_once(
        &self,
        to: &Endpoint,
        piece: &[u8],
        segment: usize,
        form: Form,
    ) -> Result<usize, Refusal> {
        let fd = self.socket.as_fd();
        match form {
            Form::Run => {
                let segment = u16::try_from(segment).expect("two segments fit one packet");
                send_messages::<1>(fd, to, piece, piece.len(), Some(segment))
            }
            Form::Single if piece.len() <= segment => {
                send_messages::<1>(fd, to, piece, segment, None)
            }
            Form::Single => send_messages::<SEGMENTS_MAX>(fd, to, piece, segment, None),
        }
    }
}

/// sendmmsg(2) with up to `N` messages of `length` bytes each; returns the bytes taken.
#[allow(unsafe_code)]
fn send_messages<const N: usize>(
    fd: BorrowedFd<'_>,
    to: &Endpoint,
    piece: &[u8],
    length: usize,
    segment: Option<u16>,
) -> Result<usize, Refusal> {
    let mut name = Name::new(to.remote);
    let mut control = Control::to_send(to, segment);
    let mut data = [libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    }; N];
    // SAFETY: all bits zero is a valid mmsghdr: null pointers and lengths of 0.
    let mut messages: [libc::mmsghdr; N] = unsafe { std::mem::zeroed() };
    let mut count = 0;
    for (datagram, (data, message)) in piece.chunks(length).zip(data.iter_mut().zip(&mut messages))
    {
        data.iov_base = datagram.as_ptr().cast_mut().cast();
        data.iov_len = datagram.len();
        let header = &mut message.msg_hdr;
        header.msg_name = name.as_mut_ptr();
        header.msg_namelen = name.len() as libc::socklen_t;
        header.msg_iov = data;
        header.msg_iovlen = 1;
        if control.len() > 0 {
            header.msg_control = control.as_mut_ptr();
            header.msg_controllen = control.len() as _;
        }
        count += 1;
    }
    // SAFETY: the first `count` messages point to one iovec of `data` each, and to `name` and
    // `control` with their lengths, all of which outlive the call; the kernel only reads the
    // datagrams.
    let taken = unsafe {
        libc::sendmmsg(
            fd.as_raw_fd(),
            messages.as_mut_ptr(),
            count,
            libc::MSG_DONTWAIT,
        )
    };
    match usize::try_from(taken) {
        Ok(taken) => Ok(piece.len().min(taken * length)),
        Err(_) => Err(Refusal(
            io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
        )),
    }
}
