//! The UDP sockets of one path.
//!
//! By hand because quinn-udp 0.6 loses the ECN bits of coalesced receives, overwrites the DSCP of each send, and
//! turns segmentation off for good after one failure.

mod message;
mod recv;
mod send;

pub use recv::{RECV_BATCH, Received, RecvBatch};
pub use send::{SendOutcome, Stop};

use crate::SetupError;
use crate::fallback::Offload;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Room for what arrives while our thread is not running: 10 Gbit/s for 10 ms in full-size
/// datagrams that were not coalesced. The kernel doubles it for its bookkeeping.
const RECEIVE_BUFFER: usize = 16 << 20;
/// Bounds what waits in the interface's queues, where nobody can re-order or drop it fairly.
const SEND_BUFFER: usize = 4 << 20;

/// An IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The version of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() {
            Self::V4
        } else {
            Self::V6
        }
    }
}

/// Both ends of a datagram's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// The peer's address.
    pub remote: SocketAddr,
    /// Our address: the one that was written to, and that an answer comes from. `None` leaves
    /// the choice to the kernel.
    pub local: Option<IpAddr>,
    /// Mark of what is sent that says that it is capable of ECN: ECT(0) in its IP header (RFC 3168).
    pub ect: bool,
}

impl From<SocketAddr> for Endpoint {
    fn from(remote: SocketAddr) -> Self {
        Self {
            remote,
            local: None,
            ect: false,
        }
    }
}

/// Counters of a [`PathSocket`] since it was opened, both families together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpCounters {
    /// Calls that handed over a run of datagrams as one.
    pub gso_sends: u64,
    /// Runs that the kernel refused as one and took singly.
    pub gso_refused: u64,
    /// Datagrams sent singly that belonged to a run.
    pub sent_singly: u64,
    /// Sends whose local address had gone, repeated with the kernel's choice.
    pub local_lost: u64,
    /// Receives thrown away because their data or ancillary data had been cut.
    pub truncated: u64,
    /// Datagrams that the kernel dropped because the receive buffer was full.
    pub overflowed: u64,
}

/// The sockets of one path, one per IP version, bound to its interface.
///
/// Datagrams are never fragmented (DF, IP_PMTUDISC_PROBE), and path MTU news of ICMP are ignored.
pub struct PathSocket {
    v4: Option<UdpSocket>,
    v6: Option<UdpSocket>,
}

/// One socket of one family.
struct UdpSocket {
    socket: Socket,
    gso: Offload,
    counters: UdpCounters,
}

impl PathSocket {
    /// Opens the sockets: one if `address` is given, otherwise IPv4 and IPv6 on all addresses of
    /// `interface`, or IPv4 alone where the system has no IPv6. Port 0 takes a free one, the same
    /// for both if it can. `mark` is the firewall mark of every datagram; setting one needs
    /// CAP_NET_ADMIN.
    pub fn open(
        interface: Option<&str>,
        address: Option<IpAddr>,
        port: u16,
        mark: u32,
    ) -> Result<Self, SetupError> {
        let open = |address, port| UdpSocket::open(interface, SocketAddr::new(address, port), mark);
        match address {
            Some(address @ IpAddr::V4(_)) => Ok(Self {
                v4: Some(open(address, port)?),
                v6: None,
            }),
            Some(address @ IpAddr::V6(_)) => Ok(Self {
                v4: None,
                v6: Some(open(address, port)?),
            }),
            None => {
                let v4 = open(Ipv4Addr::UNSPECIFIED.into(), port)?;
                let port = v4.local_addr().map_or(port, |address| address.port());
                let v6 = match open(Ipv6Addr::UNSPECIFIED.into(), port) {
                    Err(refused) if is_unsupported(&refused.error) => None,
                    v6 => Some(v6?),
                };
                Ok(Self { v4: Some(v4), v6 })
            }
        }
    }

    /// The descriptor of one family's socket, for a [`crate::Poller`].
    pub fn fd(&self, family: Family) -> Option<BorrowedFd<'_>> {
        self.socket(family).map(|socket| socket.socket.as_fd())
    }

    /// The address that one family's socket is bound to.
    pub fn local_addr(&self, family: Family) -> Option<SocketAddr> {
        self.socket(family).and_then(UdpSocket::local_addr)
    }

    /// Sends `batch` to `to`: datagrams of `segment` bytes each, the last perhaps shorter.
    ///
    /// Runs go to the kernel as one where it takes them so. What the outcome does not call sent
    /// has not been sent and stays with the caller.
    ///
    /// # Panics
    /// If `segment` is 0.
    pub fn send(&mut self, to: impl Into<Endpoint>, batch: &[u8], segment: usize) -> SendOutcome {
        let to = to.into();
        match self.socket_mut(Family::of(to.remote.ip())) {
            Some(socket) => socket.send(to, batch, segment),
            None => SendOutcome::stopped(0, libc::EAFNOSUPPORT, batch.len().min(segment)),
        }
    }

    /// Receives what waits in one family's socket, up to [`RECV_BATCH`] runs of datagrams.
    /// `WouldBlock` when nothing does, or no socket of this family is open.
    pub fn recv(&mut self, family: Family, batch: &mut RecvBatch) -> io::Result<()> {
        match self.socket_mut(family) {
            Some(UdpSocket {
                socket, counters, ..
            }) => batch.fill(socket.as_fd(), counters),
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// True if runs to peers of this family go out as one, as far as known.
    pub fn offloads(&self, family: Family) -> bool {
        self.socket(family)
            .is_some_and(|socket| socket.gso.active())
    }

    /// Forgets refusals: to be called when the path's route has changed.
    pub fn retry_offloads(&mut self) {
        self.v4
            .iter_mut()
            .chain(&mut self.v6)
            .for_each(|socket| socket.gso.accepted());
    }

    /// Counts so far.
    pub fn counters(&self) -> UdpCounters {
        self.v4
            .iter()
            .chain(&self.v6)
            .fold(UdpCounters::default(), |sum, socket| {
                let other = &socket.counters;
                UdpCounters {
                    gso_sends: sum.gso_sends + other.gso_sends,
                    gso_refused: sum.gso_refused + other.gso_refused,
                    sent_singly: sum.sent_singly + other.sent_singly,
                    local_lost: sum.local_lost + other.local_lost,
                    truncated: sum.truncated + other.truncated,
                    overflowed: sum.overflowed + other.overflowed,
                }
            })
    }

    fn socket(&self, family: Family) -> Option<&UdpSocket> {
        match family {
            Family::V4 => self.v4.as_ref(),
            Family::V6 => self.v6.as_ref(),
        }
    }

    fn socket_mut(&mut self, family: Family) -> Option<&mut UdpSocket> {
        match family {
            Family::V4 => self.v4.as_mut(),
            Family::V6 => self.v6.as_mut(),
        }
    }
}

impl UdpSocket {
    fn open(interface: Option<&str>, bind: SocketAddr, mark: u32) -> Result<Self, SetupError> {
        let target = interface.map_or_else(|| bind.to_string(), |name| format!("{bind} {name}"));
        let at = |operation| SetupError::at(operation, &target);
        let kind = Type::DGRAM.nonblocking().cloexec();
        let socket = Socket::new(Domain::for_address(bind), kind, Some(Protocol::UDP))
            .map_err(at("UDP socket"))?;
        // The interface first, so that not one datagram of another is taken.
        if let Some(name) = interface {
            socket
                .bind_device(Some(name.as_bytes()))
                .map_err(at("SO_BINDTODEVICE"))?;
        }
        if mark != 0 {
            socket.set_mark(mark).map_err(at("SO_MARK"))?;
        }
        for option in options(bind.is_ipv6()) {
            match set_int(&socket, option.level, option.name, option.value) {
                Err(error) if option.required => return Err(at(option.label)(error)),
                _ => {}
            }
        }
        // Beyond the system's limits with CAP_NET_ADMIN, up to them without.
        let size = |size: usize| size as libc::c_int;
        set_int(
            &socket,
            libc::SOL_SOCKET,
            libc::SO_RCVBUFFORCE,
            size(RECEIVE_BUFFER),
        )
        .or_else(|_| socket.set_recv_buffer_size(RECEIVE_BUFFER))
        .map_err(at("SO_RCVBUF"))?;
        set_int(
            &socket,
            libc::SOL_SOCKET,
            libc::SO_SNDBUFFORCE,
            size(SEND_BUFFER),
        )
        .or_else(|_| socket.set_send_buffer_size(SEND_BUFFER))
        .map_err(at("SO_SNDBUF"))?;
        socket.bind(&SockAddr::from(bind)).map_err(at("bind"))?;
        Ok(Self {
            socket,
            gso: Offload::default(),
            counters: UdpCounters::default(),
        })
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.socket.local_addr().ok()?.as_socket()
    }
}

/// A socket option with a number for a value.
struct IntOption {
    label: &'static str,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
    /// Whether the path is unusable without it.
    required: bool,
}

/// What every path socket has. UDP_GRO, SO_RXQ_OVFL and the traffic class only make things
/// faster or visible.
fn options(ipv6: bool) -> Vec<IntOption> {
    let option = |label, level, name, value, required| IntOption {
        label,
        level,
        name,
        value,
        required,
    };
    let mut options = vec![
        option("UDP_GRO", libc::SOL_UDP, libc::UDP_GRO, 1, false),
        option("SO_RXQ_OVFL", libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1, false),
    ];
    let (ip, ipv6_level) = (libc::IPPROTO_IP, libc::IPPROTO_IPV6);
    if ipv6 {
        let probe = libc::IPV6_PMTUDISC_PROBE;
        options.extend([
            option("IPV6_V6ONLY", ipv6_level, libc::IPV6_V6ONLY, 1, true),
            option(
                "IPV6_MTU_DISCOVER",
                ipv6_level,
                libc::IPV6_MTU_DISCOVER,
                probe,
                true,
            ),
            option("IPV6_DONTFRAG", ipv6_level, libc::IPV6_DONTFRAG, 1, true),
            option(
                "IPV6_RECVPKTINFO",
                ipv6_level,
                libc::IPV6_RECVPKTINFO,
                1,
                true,
            ),
            option(
                "IPV6_RECVTCLASS",
                ipv6_level,
                libc::IPV6_RECVTCLASS,
                1,
                false,
            ),
        ]);
    } else {
        let probe = libc::IP_PMTUDISC_PROBE;
        options.extend([
            option("IP_MTU_DISCOVER", ip, libc::IP_MTU_DISCOVER, probe, true),
            option("IP_PKTINFO", ip, libc::IP_PKTINFO, 1, true),
            option("IP_RECVTOS", ip, libc::IP_RECVTOS, 1, false),
        ]);
    }
    options
}

#[allow(unsafe_code)]
fn set_int(
    socket: &Socket,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the option's value is read from `value`, which has the length given and outlives
    // the call; the descriptor lives as long as `socket`.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(&value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The system, or this interface, has no IPv6.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL)
    )
}
