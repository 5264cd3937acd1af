//! The TCP sockets of this host (sock_diag) and the processes that hold sockets (/proc).

use std::collections::{HashMap, HashSet};
use std::fmt;

use dibs_wire::FlowKey;
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{
    AF_INET, AF_INET6, IPPROTO_TCP, TCP_CLOSE, TCP_LISTEN, TCP_TIME_WAIT,
};
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{
    ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags,
};
use nix::net::if_::if_nameindex;
use rtnetlink::packet_core::Nla as _;
use rtnetlink::sys::protocols::NETLINK_SOCK_DIAG;

use crate::Error;
use crate::wire::Wire;

/// INET_DIAG_NOCOOKIE: whichever socket has these ends.
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// INET_DIAG_ULP_INFO, INET_ULP_INFO_MPTCP in that, and MPTCP_SUBFLOW_ATTR_TOKEN_LOC in that.
const ULP_INFO: u16 = 19;
const ULP_INFO_MPTCP: u16 = 3;
const SUBFLOW_TOKEN_LOC: u16 = 2;

/// Single lookups that are quicker than to list all sockets.
const LOOKUPS: usize = 256;

/// A connected TCP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpSocket {
    /// Its connection, as it sends.
    pub key: FlowKey,
    /// The kernel's TCP state; 1 is established.
    pub state: u8,
    /// Its owner.
    pub uid: u32,
    /// The kernel's number for it, which no other socket gets until the host starts again.
    pub cookie: u64,
    /// Its inode; 0 when no process holds it any more.
    pub inode: u64,
    /// Index of the device it is bound to: such a socket cannot be steered (docs/switching.md). 0: none.
    pub bound_device: u32,
    /// The connection of MPTCP that it is a subflow of, by the kernel's number for that (RFC 8684, 3.2: the token).
    pub mptcp: Option<u32>,
    /// Counts of TCP, if the kernel told.
    pub counts: Option<TcpCounts>,
}

/// From the kernel's tcp_info.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpCounts {
    /// By how many bits it shifts the windows that the far end gives (RFC 7323).
    pub window_scale: u8,
    /// Smoothed round-trip time in microseconds.
    pub rtt_us: u32,
    /// Segments sent again over the connection's life.
    pub retransmissions: u32,
    /// Bytes a second that arrived at the far end, as last measured.
    pub delivery_rate: u64,
    /// Bytes that the far end acknowledged.
    pub bytes_acked: u64,
    /// Bytes received.
    pub bytes_received: u64,
    /// Bytes sent that the far end has not acknowledged.
    pub outstanding: u32,
    /// Attempts to send, or to learn of room, that nobody has answered since.
    pub attempts: u8,
}

/// A process that holds a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its name as in /proc/PID/comm.
    pub name: String,
}

impl fmt::Display for Process {
    /// `name (pid 7)`, the name without control characters.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.name.escape_default(), self.pid)
    }
}

/// The connected TCP sockets of these connections, as they send; those that there are not are missing.
pub async fn find(connections: &[FlowKey]) -> Result<Vec<TcpSocket>, Error> {
    if connections.len() > LOOKUPS {
        return list_of(connections).await;
    }
    let mut wire = Wire::open(NETLINK_SOCK_DIAG).map_err(Error::netlink("open sock_diag"))?;
    let mut found = Vec::with_capacity(connections.len());
    let mut missing = Vec::new();
    for key in connections {
        match look_up(&mut wire, key, 0).await? {
            Some(socket) => found.push(socket),
            None => missing.push(*key),
        }
    }
    if missing.is_empty() {
        return Ok(found);
    }
    // One that is bound to a device is found only by that. To list all sockets takes the kernel
    // milliseconds however few there are: it looks through a table for very many.
    let devices = if_nameindex().map_err(|error| Error::netlink("list devices")(error.into()))?;
    if missing.len() * devices.iter().count() > LOOKUPS {
        found.extend(list_of(&missing).await?);
        return Ok(found);
    }
    for key in &missing {
        for device in &devices {
            if let Some(socket) = look_up(&mut wire, key, device.index()).await? {
                found.push(socket);
                break;
            }
        }
    }
    Ok(found)
}

/// The connected TCP sockets of these connections, as [`list`] finds them.
async fn list_of(connections: &[FlowKey]) -> Result<Vec<TcpSocket>, Error> {
    let meant: HashSet<FlowKey> = connections.iter().copied().collect();
    list(|socket| Some(socket).filter(|socket| meant.contains(&socket.key))).await
}

/// The connected TCP socket of this connection that is bound to `device`, or to none.
async fn look_up(wire: &mut Wire, key: &FlowKey, device: u32) -> Result<Option<TcpSocket>, Error> {
    let socket_id = SocketId {
        source_port: key.sport,
        destination_port: key.dport,
        source_address: key.src,
        destination_address: key.dst,
        interface_id: device,
        cookie: NO_COOKIE,
    };
    let family = if key.src.is_ipv4() { AF_INET } else { AF_INET6 };
    let answers = match wire.request(query(family, socket_id), 0).await {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Vec::new(),
        answers => answers.map_err(Error::netlink("look for a TCP socket"))?,
    };
    let mut sockets = answers.into_iter().filter_map(connected);
    // Where nobody is connected, a listener answers.
    Ok(sockets.find(|socket| socket.key == *key))
}

/// Results of `pick` for every connected TCP socket of both families; IPv4-mapped addresses are given as IPv4.
pub async fn list<U>(mut pick: impl FnMut(TcpSocket) -> Option<U>) -> Result<Vec<U>, Error> {
    let mut wire = Wire::open(NETLINK_SOCK_DIAG).map_err(Error::netlink("open sock_diag"))?;
    let mut sockets = Vec::new();
    for (family, socket_id) in [
        (AF_INET, SocketId::new_v4()),
        (AF_INET6, SocketId::new_v6()),
    ] {
        let picked = wire.gather(query(family, socket_id), |answer| pick(connected(answer)?));
        let picked = picked.await.map_err(Error::netlink("list TCP sockets"))?;
        // There may be thousands: not copied where it can be helped.
        match sockets.is_empty() {
            true => sockets = picked,
            false => sockets.extend(picked),
        }
    }
    Ok(sockets)
}

/// The ports of listeners whose queues of connections to be accepted are full: the kernel drops calls to them.
pub async fn full_listeners() -> Result<HashSet<u16>, Error> {
    let mut wire = Wire::open(NETLINK_SOCK_DIAG).map_err(Error::netlink("open sock_diag"))?;
    let mut full = HashSet::new();
    for (family, socket_id) in [
        (AF_INET, SocketId::new_v4()),
        (AF_INET6, SocketId::new_v6()),
    ] {
        let query = SockDiagMessage::InetRequest(InetRequest {
            family,
            protocol: IPPROTO_TCP,
            extensions: ExtensionFlags::empty(),
            states: StateFlags::LISTEN,
            socket_id,
        });
        let found = wire.gather(query, full_listener).await;
        full.extend(found.map_err(Error::netlink("list listening TCP sockets"))?);
    }
    Ok(full)
}

/// The port of a listener whose queue is full. Of these the kernel gives as queues how many wait, and how many may.
fn full_listener(answer: SockDiagMessage) -> Option<u16> {
    let SockDiagMessage::InetResponse(response) = answer else {
        return None;
    };
    let header = &response.header;
    let full = header.recv_queue > 0 && header.recv_queue >= header.send_queue;
    full.then_some(header.socket_id.source_port)
}

fn query(family: u8, socket_id: SocketId) -> SockDiagMessage {
    SockDiagMessage::InetRequest(InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::INFO,
        states: StateFlags::all() - StateFlags::LISTEN - StateFlags::CLOSE - StateFlags::TIME_WAIT,
        socket_id,
    })
}

fn connected(answer: SockDiagMessage) -> Option<TcpSocket> {
    let SockDiagMessage::InetResponse(response) = answer else {
        return None;
    };
    // Who asks for one socket gets it in any state.
    let others = [TCP_LISTEN, TCP_CLOSE, TCP_TIME_WAIT];
    (!others.contains(&response.header.state)).then(|| socket(&response))
}

/// Two numbers of 32 bits, of which the first is the lower one.
fn cookie(bytes: [u8; 8]) -> u64 {
    let [low, high] = [0, 4].map(|at| bytes[at..at + 4].try_into().expect("four bytes"));
    u64::from(u32::from_ne_bytes(high)) << 32 | u64::from(u32::from_ne_bytes(low))
}

fn socket(response: &InetResponse) -> TcpSocket {
    let header = &response.header;
    let id = &header.socket_id;
    let counts = response.nlas.iter().find_map(|nla| match nla {
        Nla::TcpInfo(info) => Some(TcpCounts {
            // Of two bit fields of four bits, the first.
            window_scale: if cfg!(target_endian = "little") {
                info.wscale & 0xf
            } else {
                info.wscale >> 4
            },
            rtt_us: info.rtt,
            retransmissions: info.total_retrans,
            delivery_rate: info.delivery_rate,
            bytes_acked: info.bytes_acked,
            bytes_received: info.bytes_received,
            // What waits for an acknowledgement, or to be sent.
            outstanding: header.send_queue.saturating_sub(info.notsent_bytes),
            attempts: info.retransmits.max(info.probes),
        }),
        _ => None,
    });
    TcpSocket {
        key: FlowKey::tcp(
            (id.source_address.to_canonical(), id.source_port),
            (id.destination_address.to_canonical(), id.destination_port),
        ),
        state: header.state,
        uid: header.uid,
        cookie: cookie(id.cookie),
        inode: u64::from(header.inode),
        bound_device: id.interface_id,
        mptcp: response.nlas.iter().find_map(|nla| match nla {
            Nla::Other(other) if other.kind() == ULP_INFO => {
                let mut value = vec![0; other.value_len()];
                other.emit_value(&mut value);
                token(&value)
            }
            _ => None,
        }),
        counts,
    }
}

/// The token in what the kernel tells of a socket's upper layer (include/uapi/linux/inet_diag.h, mptcp.h), which it
/// tells to who may administrate the network.
fn token(ulp_info: &[u8]) -> Option<u32> {
    let of_mptcp = attribute(ulp_info, ULP_INFO_MPTCP)?;
    let local = attribute(of_mptcp, SUBFLOW_TOKEN_LOC)?;
    Some(u32::from_ne_bytes(local.try_into().ok()?))
}

/// The value of a netlink attribute among others.
fn attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    /// NLA_F_NESTED and NLA_F_NET_BYTEORDER stand above the type.
    const TYPE: u16 = 0x3fff;
    loop {
        let ([length, found], _) = attributes.split_first_chunk::<4>().map(|(head, rest)| {
            let half = |at: usize| u16::from_ne_bytes([head[at], head[at + 1]]);
            ([half(0), half(2)], rest)
        })?;
        let value = attributes.get(4..usize::from(length))?;
        if found & TYPE == kind {
            return Some(value);
        }
        attributes = attributes.get(usize::from(length).next_multiple_of(4)..)?;
    }
}

/// The processes that hold the sockets `inodes`: for each inode the lowest pid. Reads all of
/// /proc: it takes milliseconds, and blocks. Processes that may not be looked into are missing.
pub fn processes(inodes: &HashSet<u64>) -> HashMap<u64, Process> {
    let mut found: HashMap<u64, Process> = HashMap::new();
    let numbered = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
    let mut pids: Vec<u32> = std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(numbered)
        .collect();
    pids.sort_unstable();
    for pid in pids {
        let Ok(files) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        for file in files.flatten() {
            let Some(inode) = socket_inode(&file.path()) else {
                continue;
            };
            if inodes.contains(&inode) && !found.contains_key(&inode) {
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                found.insert(
                    inode,
                    Process {
                        pid,
                        name: name.trim_end().to_owned(),
                    },
                );
            }
        }
    }
    found
}

/// The processes that hold a UDP port of this network namespace, by pid. Reads all of /proc, as [`processes`] does.
pub fn of_udp_port(port: u16) -> Vec<Process> {
    let tables = ["udp", "udp6"].map(|name| std::fs::read_to_string(format!("/proc/net/{name}")));
    let inodes: HashSet<u64> = { tables.iter().flatten() }
        .flat_map(|table| udp_inodes(table, port))
        .collect();
    let mut holders = Vec::from_iter(processes(&inodes).into_values());
    holders.sort_by_key(|holder| holder.pid);
    holders.dedup();
    holders
}

/// The inodes of the sockets at a port, in a table like /proc/net/udp: after a line of headers,
/// `sl local remote state queues timer retransmits uid timeout inode`.
fn udp_inodes(table: &str, port: u16) -> impl Iterator<Item = u64> {
    let end = format!(":{port:04X}");
    table.lines().filter_map(move |line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let inode = fields.get(9)?.parse().ok()?;
        fields[1].ends_with(&end).then_some(inode)
    })
}

/// The inodes of the sockets of the processes that serve a TUN or TAP device. Reads all of /proc, as
/// [`processes`] does.
pub fn of_tun(device: &str) -> HashSet<u64> {
    let mut inodes = HashSet::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let files = std::fs::read_dir(process.path().join("fd"));
        let files: Vec<_> = files.into_iter().flatten().flatten().collect();
        let serves = |file: &std::fs::DirEntry| {
            let is_tun = std::fs::read_link(file.path())
                .is_ok_and(|target| target == std::path::Path::new("/dev/net/tun"));
            let info = process.path().join("fdinfo").join(file.file_name());
            // As drivers/net/tun.c shows it.
            let of_device = |text: String| {
                let mut names = text.lines().filter_map(|line| line.strip_prefix("iff:"));
                names.any(|name| name.trim() == device)
            };
            is_tun && std::fs::read_to_string(info).is_ok_and(of_device)
        };
        if files.iter().any(serves) {
            inodes.extend(files.iter().filter_map(|file| socket_inode(&file.path())));
        }
    }
    inodes
}

fn socket_inode(path: &std::path::Path) -> Option<u64> {
    let target = std::fs::read_link(path).ok()?;
    target
        .to_str()?
        .strip_prefix("socket:[")?
        .strip_suffix(']')?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sockets_of_a_port_are_found() {
        let table = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            1: 0101000A:14B4 00000000:0000 07 00000000:00000000 00:00000000 00000000  1000        0 4711 2 0 0\n\
            2: 00000000:14B5 00000000:14B4 07 00000000:00000000 00:00000000 00000000     0        0 4712 2 0 0\n";
        let of = |port| Vec::from_iter(udp_inodes(table, port));
        assert_eq!(of(5300), [4711]);
        assert_eq!(of(5301), [4712]);
        assert!(of(0).is_empty());
    }

    fn nla(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = 4 + value.len() as u16;
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn the_token_of_mptcp_is_found_among_other_attributes() {
        let (remote, local) = (nla(1, &7u32.to_ne_bytes()), nla(2, &9u32.to_ne_bytes()));
        let of_mptcp = nla(0x8000 | ULP_INFO_MPTCP, &[remote, local].concat());
        let info = [nla(1, b"mptcp\0"), of_mptcp].concat();
        assert_eq!(token(&info), Some(9));
        assert_eq!(token(&nla(1, b"tls\0")), None);
        for length in 0..info.len() {
            let _ = token(&info[..length]);
        }
        assert_eq!(token(&[0; 64]), None, "a length of nothing");
    }
}
