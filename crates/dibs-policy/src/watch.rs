//! Notices that something which steering rests on may have changed.

use std::io;

use rtnetlink::MulticastGroup as Group;
use rtnetlink::sys::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE};
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, TokioSocket};

use crate::Error;

/// NFNLGRP_NFTABLES of linux/netfilter/nfnetlink.h: every change of nftables, hence of iptables-nft.
const NFTABLES: u32 = 7;

/// Wakes when links, addresses, routes, RPDB rules or nftables change, our own changes included: then
/// [`Steering::set`](crate::Steering::set) is repeated, which does nothing where nothing is amiss.
/// Changes made with the legacy variant of iptables are not announced by the kernel; against those
/// only repeating from time to time helps.
pub struct Watch {
    route: TokioSocket,
    tables: TokioSocket,
    /// The socket whose changes of nftables are no news.
    own: u32,
}

impl Watch {
    /// Watches from this moment on. What the netlink socket `own` changes in nftables is no news (0: all
    /// is). Needs a tokio runtime.
    pub fn open(own: u32) -> Result<Self, Error> {
        let groups = [
            Group::Link,
            Group::Ipv4Ifaddr,
            Group::Ipv6Ifaddr,
            Group::Ipv4Route,
            Group::Ipv6Route,
            Group::Ipv4Rule,
            Group::Ipv6Rule,
            Group::Ipv4Netconf,
            Group::Ipv6Netconf,
            Group::Tc,
        ];
        let groups = groups.map(|group| group as u32);
        let open = || -> io::Result<Self> {
            Ok(Self {
                route: subscribe(NETLINK_ROUTE, &groups)?,
                tables: subscribe(NETLINK_NETFILTER, &[NFTABLES])?,
                own,
            })
        };
        open().map_err(Error::netlink("watch for changes"))
    }

    /// Waits for the next change. What came together is told once. Safe to drop and call again.
    pub async fn changed(&mut self) -> Result<(), Error> {
        loop {
            let news = tokio::select! {
                woken = self.route.recv_from_full() => told(woken.map(|_| true)),
                woken = self.tables.recv_from_full() => told(woken.map(|(d, _)| self.is_news(&d))),
            };
            if !news? {
                continue;
            }
            for socket in [&self.route, &self.tables] {
                while let Some(more) = now(socket.recv_from_full()).await {
                    told(more.map(|_| true))?;
                }
            }
            return Ok(());
        }
    }

    /// Whether somebody else made this change of nftables: the sender's number is in the header.
    fn is_news(&self, datagram: &[u8]) -> bool {
        let from = datagram.get(12..16).and_then(|word| word.first_chunk());
        from.is_none_or(|from| u32::from_ne_bytes(*from) != self.own || self.own == 0)
    }
}

/// An overrun is a change too.
fn told(received: io::Result<bool>) -> Result<bool, Error> {
    match received {
        Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(true),
        other => other.map_err(Error::netlink("watch for changes")),
    }
}

fn subscribe(protocol: isize, groups: &[u32]) -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(protocol)?;
    socket.socket_mut().bind_auto()?;
    for &group in groups {
        socket.socket_mut().add_membership(group)?;
    }
    Ok(socket)
}

/// What `future` gives without waiting.
async fn now<T>(future: impl Future<Output = T> + Unpin) -> Option<T> {
    tokio::select! {
        biased;
        value = future => Some(value),
        () = std::future::ready(()) => None,
    }
}
