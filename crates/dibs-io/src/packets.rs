//! Whole IP packets beside the kernel's TCP: sent by the ordinary route, and heard as they come in.
//!
//! For a few packets at a time, and not on the way of data.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::sys::socket::{
    ControlMessage, LinkAddr, MsgFlags, SockaddrStorage, recvfrom, sendmsg, setsockopt, sockopt,
};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use crate::SetupError;

/// Longest packet that is heard: IPv6, TCP with all options.
const LONGEST: usize = 40 + 60;
/// Hosts that the kernel compares a packet's source with before it hands the packet over; with more the reader does.
const MOST_SOURCES: usize = 16;
/// Connections whose ports the kernel compares with those of a packet; with more the reader does.
const MOST_PORTS: usize = 512;
/// Numbers of each kind that the kernel compares with those of a packet, at most.
const MOST_NUMBERS: usize = 500;
/// Bytes of packets that wait to be heard: some thousands, as the kernel counts 700 bytes for each.
const RECEIVE_BUFFER: usize = 4 << 20;

/// A socket that sends whole packets of one IP version by the ordinary route.
#[derive(Debug)]
pub struct PacketSender {
    socket: Socket,
}

impl PacketSender {
    /// A sender of packets with this firewall mark.
    pub fn open(is_v4: bool, mark: u32) -> Result<Self, SetupError> {
        let at = |operation| SetupError::at(operation, "a raw socket");
        let domain = if is_v4 { Domain::IPV4 } else { Domain::IPV6 };
        let raw = Some(Protocol::from(libc::IPPROTO_RAW));
        let socket =
            Socket::new(domain, Type::RAW.nonblocking().cloexec(), raw).map_err(at("socket"))?;
        socket.set_mark(mark).map_err(at("SO_MARK"))?;
        // The packets that a gateway sends have sources that are not its own. Raw sockets of IPv4 may do that anyway.
        if !is_v4 {
            let freebind = socket.set_freebind_v6(true);
            freebind.map_err(at("IPV6_FREEBIND"))?;
        }
        Ok(Self { socket })
    }

    /// Sends a packet from and to these addresses, which are those of its header: so routes are looked up as for the
    /// packets of a connection.
    pub fn send(&self, source: IpAddr, destination: IpAddr, packet: &[u8]) -> io::Result<()> {
        let to = SockaddrStorage::from(SocketAddr::new(destination, 0));
        let data = [io::IoSlice::new(packet)];
        let send = |source| {
            let (fd, flags) = (self.socket.as_raw_fd(), MsgFlags::empty());
            sendmsg(fd, &data, &[source], flags, Some(&to))
        };
        let sent = match source {
            IpAddr::V4(source) => send(ControlMessage::Ipv4PacketInfo(&libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr {
                    s_addr: u32::from_ne_bytes(source.octets()),
                },
                ipi_addr: libc::in_addr { s_addr: 0 },
            })),
            IpAddr::V6(source) => send(ControlMessage::Ipv6PacketInfo(&libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr {
                    s6_addr: source.octets(),
                },
                ipi6_ifindex: 0,
            })),
        };
        sent.map(drop).map_err(io::Error::from)
    }
}

/// A socket that hears TCP acknowledgements without data of one IP version, as they come in by any interface before
/// any firewall of this host, or as they go out behind all of them.
#[derive(Debug)]
pub struct PacketEar {
    socket: Socket,
}

impl PacketEar {
    /// Hears from now on what comes from these hosts, and from and to these ports (source, destination).
    pub fn open(is_v4: bool, sources: &[IpAddr], ports: &[(u16, u16)]) -> Result<Self, SetupError> {
        Self::filtered(is_v4, false, &between(is_v4, sources, ports))
    }

    /// Hears from now on what comes from anywhere and has one of these sequence numbers, acknowledgement numbers or
    /// time stamps (TSval), the latter where they stand in the usual layout. Up to 500 of each kind.
    pub fn by_numbers(
        is_v4: bool,
        numbers: &[(u32, u32)],
        tsvals: &[u32],
    ) -> Result<Self, SetupError> {
        Self::filtered(is_v4, false, &numbered(is_v4, numbers, tsvals))
    }

    /// Hears from now on what this host sends from and to these ports (source, destination).
    pub fn of_own(is_v4: bool, ports: &[(u16, u16)]) -> Result<Self, SetupError> {
        Self::filtered(is_v4, true, &outgoing(is_v4, ports))
    }

    fn filtered(is_v4: bool, own: bool, filter: &[SockFilter]) -> Result<Self, SetupError> {
        let at = |operation| SetupError::at(operation, "a packet socket");
        let kind = Type::DGRAM.nonblocking().cloexec();
        // Nothing comes in before it is bound, so nothing passes by the filter.
        let socket = Socket::new(Domain::PACKET, kind, None).map_err(at("socket"))?;
        socket
            .attach_filter(filter)
            .map_err(at("SO_ATTACH_FILTER"))?;
        // Beyond the system's limit with CAP_NET_ADMIN, up to it without.
        setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)
            .or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &RECEIVE_BUFFER))
            .map_err(|errno| at("SO_RCVBUF")(errno.into()))?;
        let protocol = match (own, is_v4) {
            // A socket of one protocol does not hear what goes out (packet(7)).
            (true, _) => libc::ETH_P_ALL,
            (false, true) => libc::ETH_P_IP,
            (false, false) => libc::ETH_P_IPV6,
        };
        bind(&socket, protocol).map_err(at("bind"))?;
        Ok(Self { socket })
    }

    /// The next packet, and the index of the interface that it came in by; `WouldBlock` if there is none.
    pub fn hear(&self) -> io::Result<(Vec<u8>, u32)> {
        let mut buffer = [0; LONGEST];
        let (length, from) = recvfrom::<LinkAddr>(self.socket.as_raw_fd(), &mut buffer)?;
        let interface = from.map_or(0, |from| from.ifindex());
        Ok((buffer[..length].to_vec(), interface as u32))
    }
}

impl AsFd for PacketEar {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for PacketEar {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.socket.as_raw_fd()
    }
}

#[allow(unsafe_code)]
fn bind(socket: &Socket, protocol: i32) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (protocol as u16).to_be(),
        sll_ifindex: 0,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address is a sockaddr_ll of this length, and lives for the call.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    match bound {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

const LOAD_BYTE: u16 = 0x30;
const LOAD_HALF: u16 = 0x28;
const LOAD_WORD: u16 = 0x20;
const AND: u16 = 0x54;
const IF_EQUAL: u16 = 0x15;
const IF_GREATER: u16 = 0x25;
const SKIP: u16 = 0x05;
const RETURN: u16 = 0x06;

/// An instruction of classic BPF (bpf(4)); offsets count from the IP header.
const fn op(code: u16, value: u32) -> SockFilter {
    SockFilter::new(code, 0, 0, value)
}

const fn jump(code: u16, value: u32, if_so: u8, if_not: u8) -> SockFilter {
    SockFilter::new(code, if_so, if_not, value)
}

const fn refuse() -> SockFilter {
    op(RETURN, 0)
}

const fn take() -> SockFilter {
    op(RETURN, u32::MAX)
}

/// Refuses the packet unless what is there has this value.
const fn is(load: u16, at: u32, value: u32) -> [SockFilter; 3] {
    [op(load, at), jump(IF_EQUAL, value, 1, 0), refuse()]
}

/// Offset of the TCP header: packets with options of IP are not heard.
const fn tcp_at(is_v4: bool) -> u32 {
    if is_v4 { 20 } else { 40 }
}

/// Beginning of a program that refuses all but TCP segments with ACK alone that are as long as their headers.
fn acknowledgements(is_v4: bool) -> Vec<SockFilter> {
    let mut program = Vec::new();
    // Neither fragments nor options of IP, which a router adds to none.
    let (length_at, longest) = match is_v4 {
        true => {
            program.extend(is(LOAD_BYTE, 0, 0x45));
            program.extend(is(LOAD_BYTE, 9, 6));
            (2, 20 + 60)
        }
        false => {
            let version = [op(LOAD_BYTE, 0), op(AND, 0xf0), jump(IF_EQUAL, 0x60, 1, 0)];
            program.extend(version);
            program.push(refuse());
            program.extend(is(LOAD_BYTE, 6, 6));
            (4, 60)
        }
    };
    program.extend([
        op(LOAD_HALF, length_at),
        jump(IF_GREATER, longest, 0, 1),
        refuse(),
    ]);
    program.extend(is(LOAD_BYTE, tcp_at(is_v4) + 13, 0x10));
    program
}

/// Adds to a program that it refuses all but these ports, unless there are too many.
fn of_ports(program: &mut Vec<SockFilter>, is_v4: bool, ports: &[(u16, u16)]) {
    if ports.len() > MOST_PORTS {
        return;
    }
    program.push(op(LOAD_WORD, tcp_at(is_v4)));
    for (index, (from, to)) in ports.iter().enumerate() {
        // To behind the refusal that follows the last of them.
        let behind = 2 * (ports.len() - index - 1) + 1;
        let word = u32::from(*from) << 16 | u32::from(*to);
        program.extend([jump(IF_EQUAL, word, 0, 1), op(SKIP, behind as u32)]);
    }
    program.push(refuse());
}

/// A program that takes acknowledgements of these ports from these hosts.
fn between(is_v4: bool, sources: &[IpAddr], ports: &[(u16, u16)]) -> Vec<SockFilter> {
    let mut program = acknowledgements(is_v4);
    of_ports(&mut program, is_v4, ports);
    let last_word = |source: &IpAddr| match source {
        IpAddr::V4(source) => source.to_bits(),
        IpAddr::V6(source) => source.to_bits() as u32,
    };
    if sources.len() <= MOST_SOURCES {
        program.push(op(LOAD_WORD, if is_v4 { 12 } else { 20 }));
        let words = sources.iter().map(last_word);
        program.extend(words.flat_map(|word| [jump(IF_EQUAL, word, 0, 1), take()]));
        program.push(refuse());
    } else {
        program.push(take());
    }
    program
}

/// A program that takes acknowledgements of these ports that this host sends.
fn outgoing(is_v4: bool, ports: &[(u16, u16)]) -> Vec<SockFilter> {
    /// Kind of a packet (linux/filter.h, SKF_AD_PKTTYPE; linux/if_packet.h, PACKET_OUTGOING).
    const KIND_AT: u32 = 0xffff_f004;
    const OUTGOING: u32 = 4;
    let mut program = Vec::from(is(LOAD_BYTE, KIND_AT, OUTGOING));
    program.extend(acknowledgements(is_v4));
    of_ports(&mut program, is_v4, ports);
    program.push(take());
    program
}

/// A program that takes acknowledgements with any of these numbers (sequence, acknowledgement) or time stamps.
fn numbered(is_v4: bool, numbers: &[(u32, u32)], tsvals: &[u32]) -> Vec<SockFilter> {
    let (tcp, mut program) = (tcp_at(is_v4), acknowledgements(is_v4));
    let mut any_of = |at: u32, words: Vec<u32>| {
        program.push(op(LOAD_WORD, at));
        let words = words.into_iter().take(MOST_NUMBERS);
        program.extend(words.flat_map(|word| [jump(IF_EQUAL, word, 0, 1), take()]));
    };
    any_of(tcp + 4, numbers.iter().map(|(seq, _)| *seq).collect());
    any_of(tcp + 8, numbers.iter().map(|(_, ack)| *ack).collect());
    // Without options the packet ends there, and so does the program.
    any_of(tcp + 24, tsvals.to_vec());
    program.push(refuse());
    program
}
