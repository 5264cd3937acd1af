//! Listening, connecting, and asking the kernel about a connection.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd as _};
use std::time::Duration;

use anyhow::{Context as _, Result};
use dibs_netns::{HANG, Host, wait_for};
use serde::Serialize;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

/// How long a connection may take to come about, and how long it may be silent before it is given
/// up.
pub(crate) const PATIENCE: Duration = HANG;

/// linux/socket.h and linux/mptcp.h; not in libc.
const SOL_MPTCP: libc::c_int = 284;
const MPTCP_INFO: libc::c_int = 1;

/// The transport of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// TCP.
    #[default]
    Tcp,
    /// Multipath TCP (RFC 8684) of the kernel.
    Mptcp,
}

impl Transport {
    fn socket(self, address: SocketAddr) -> io::Result<Socket> {
        let protocol = match self {
            Self::Tcp => Protocol::TCP,
            Self::Mptcp => Protocol::MPTCP,
        };
        Socket::new(Domain::for_address(address), Type::STREAM, Some(protocol))
    }

    /// Listens at the port on every address of the family: MPTCP's further subflows come to others
    /// than the one asked for.
    ///
    /// # Errors
    /// If the port is taken, or the kernel has no such transport.
    pub fn listen(self, host: &Host, address: SocketAddr) -> Result<TcpListener> {
        let listener = host.in_ns(|| {
            let socket = self.socket(address)?;
            socket.set_reuse_address(true)?;
            let any: IpAddr = match address {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            socket.bind(&SocketAddr::new(any, address.port()).into())?;
            socket.listen(64)?;
            // For `accept`, which must be able to give up.
            socket.set_nonblocking(true)?;
            io::Result::Ok(socket.into())
        });
        listener.with_context(|| format!("{self:?} listener at {address} on host {}", host.name()))
    }

    /// Connects from a host.
    ///
    /// # Errors
    /// If nobody answers there.
    pub fn connect(self, host: &Host, address: SocketAddr) -> Result<TcpStream> {
        host.in_ns(|| self.connect_here(address))
            .with_context(|| format!("{self:?} connection from host {} to {address}", host.name()))
    }

    /// Connects from where the calling thread is.
    pub(crate) fn connect_here(self, address: SocketAddr) -> io::Result<TcpStream> {
        let socket = self.socket(address)?;
        socket.connect_timeout(&address.into(), PATIENCE)?;
        settle(socket.into())
    }
}

/// Accepts one connection on a non-blocking listener.
///
/// # Errors
/// If none comes for [`HANG`](crate::HANG).
pub fn accept(listener: &TcpListener) -> Result<TcpStream> {
    let accepted = wait_for(PATIENCE, "a connection", || match listener.accept() {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        result => Some(result),
    })?;
    accepted
        .and_then(|(stream, _)| settle(stream))
        .context("accept")
}

/// Has what the socket sends follow this congestion control, as `net.ipv4.tcp_available_congestion_control` names it.
///
/// # Errors
/// If the kernel has none of that name.
pub fn set_congestion(stream: &TcpStream, name: &str) -> Result<()> {
    let set = SockRef::from(stream).set_tcp_congestion(name.as_bytes());
    set.with_context(|| format!("congestion control {name}"))
}

fn settle(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Segments that a TCP connection has retransmitted (TCP_INFO).
///
/// # Errors
/// If the system does not tell.
pub fn retransmissions(stream: &TcpStream) -> Result<u64> {
    // SAFETY: all zero is a valid tcp_info, which has nothing but integers.
    #[allow(unsafe_code)]
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    get_option(stream, libc::SOL_TCP, libc::TCP_INFO, &mut info).context("TCP_INFO")?;
    Ok(u64::from(info.tcpi_total_retrans))
}

/// Subflows of an MPTCP connection, the first included.
pub(crate) fn subflows(stream: &TcpStream) -> Result<u32> {
    // struct mptcp_info begins with the number of additional subflows.
    let mut info = [0u8; 64];
    get_option(stream, SOL_MPTCP, MPTCP_INFO, &mut info)
        .context("MPTCP_INFO: the connection has fallen back to TCP")?;
    Ok(u32::from(info[0]) + 1)
}

/// `value` must be of a type for which all bits are valid.
fn get_option<T>(
    stream: &TcpStream,
    level: libc::c_int,
    option: libc::c_int,
    value: &mut T,
) -> io::Result<()> {
    let mut len = size_of::<T>() as libc::socklen_t;
    let fd = stream.as_fd().as_raw_fd();
    #[allow(unsafe_code)]
    // SAFETY: the destination is writable for the length given.
    let result = unsafe { libc::getsockopt(fd, level, option, (&raw mut *value).cast(), &mut len) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Segments that all TCP connections of a host have retransmitted.
pub(crate) fn host_retransmissions(host: &Host) -> Result<u64> {
    let table = host.in_ns(|| std::fs::read_to_string("/proc/thread-self/net/snmp"))?;
    parse_retransmissions(&table).context("/proc/net/snmp has no Tcp RetransSegs")
}

/// The table has a line of names and a line of numbers per protocol.
fn parse_retransmissions(table: &str) -> Option<u64> {
    let mut tcp = table.lines().filter_map(|line| line.strip_prefix("Tcp:"));
    let column = tcp
        .next()?
        .split_ascii_whitespace()
        .position(|name| name == "RetransSegs")?;
    tcp.next()?
        .split_ascii_whitespace()
        .nth(column)?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retransmissions_are_found_by_name() {
        let table = "Ip: A B\nIp: 1 2\nTcp: InSegs RetransSegs InErrs\nTcp: 10 7 0\n";
        assert_eq!(parse_retransmissions(table), Some(7));
        assert_eq!(parse_retransmissions("Ip: A\nIp: 1\n"), None);
    }
}
