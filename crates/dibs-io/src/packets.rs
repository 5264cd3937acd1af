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

/// A socket that hears TCP acknowledgements without data of one IP version, as they come in by any interface, before
/// any firewall of this host.
#[derive(Debug)]
pub struct PacketEar {
    socket: Socket,
}

impl PacketEar {
    /// Hears from now on what comes from these hosts, and from and to these ports (source, destination).
    pub fn open(is_v4: bool, sources: &[IpAddr], ports: &[(u16, u16)]) -> Result<Self, SetupError> {
        let at = |operation| SetupError::at(operation, "a packet socket");
        let kind = Type::DGRAM.nonblocking().cloexec();
        // Nothing comes in before it is bound, so nothing passes by the filter.
        let socket = Socket::new(Domain::PACKET, kind, None).map_err(at("socket"))?;
        socket
            .attach_filter(&filter(is_v4, sources, ports))
            .map_err(at("SO_ATTACH_FILTER"))?;
        // Beyond the system's limit with CAP_NET_ADMIN, up to it without.
        setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)
            .or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &RECEIVE_BUFFER))
            .map_err(|errno| at("SO_RCVBUF")(errno.into()))?;
        bind(&socket, is_v4).map_err(at("bind"))?;
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
fn bind(socket: &Socket, is_v4: bool) -> io::Result<()> {
    let protocol = if is_v4 {
        libc::ETH_P_IP
    } else {
        libc::ETH_P_IPV6
    };
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

/// A program of classic BPF (bpf(4)) that takes TCP segments with ACK alone that are as long as their headers, from
/// these hosts and of these ports. Offsets count from the IP header.
fn filter(is_v4: bool, sources: &[IpAddr], ports: &[(u16, u16)]) -> Vec<SockFilter> {
    const LOAD_BYTE: u16 = 0x30;
    const LOAD_HALF: u16 = 0x28;
    const LOAD_WORD: u16 = 0x20;
    const IF_EQUAL: u16 = 0x15;
    const IF_GREATER: u16 = 0x25;
    const SKIP: u16 = 0x05;
    const RETURN: u16 = 0x06;
    let jump = |code, value, if_so, if_not| SockFilter::new(code, if_so, if_not, value);
    let op = |code, value| SockFilter::new(code, 0, 0, value);
    let refuse = || op(RETURN, 0);
    // Refuses the packet unless what is there has this value.
    let is = |load, at, value| [op(load, at), jump(IF_EQUAL, value, 1, 0), refuse()];
    let mut program = Vec::new();
    // Neither fragments nor options of IP, which a router adds to none.
    let (tcp, length_at, longest) = match is_v4 {
        true => {
            program.extend(is(LOAD_BYTE, 0, 0x45));
            program.extend(is(LOAD_BYTE, 9, 6));
            (20, 2, 20 + 60)
        }
        false => {
            program.extend(is(LOAD_BYTE, 6, 6));
            (40, 4, 60)
        }
    };
    program.extend([
        op(LOAD_HALF, length_at),
        jump(IF_GREATER, longest, 0, 1),
        refuse(),
    ]);
    program.extend(is(LOAD_BYTE, tcp + 13, 0x10));
    if ports.len() <= MOST_PORTS {
        program.push(op(LOAD_WORD, tcp));
        for (index, (from, to)) in ports.iter().enumerate() {
            // To behind the refusal that follows the last of them.
            let behind = 2 * (ports.len() - index - 1) + 1;
            let word = u32::from(*from) << 16 | u32::from(*to);
            program.extend([jump(IF_EQUAL, word, 0, 1), op(SKIP, behind as u32)]);
        }
        program.push(refuse());
    }
    let last_word = |source: &IpAddr| match source {
        IpAddr::V4(source) => source.to_bits(),
        IpAddr::V6(source) => source.to_bits() as u32,
    };
    let take = || op(RETURN, u32::MAX);
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
