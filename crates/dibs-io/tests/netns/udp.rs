//! Path sockets between hosts joined by veth pairs.

use crate::{allocations, ip, join, two_hosts};
use anyhow::Result;
use dibs_io::{
    Endpoint, Family, Interest, PathSocket, Poller, RECV_BATCH, RecvBatch, SendOutcome, Stop,
};
use dibs_netns::{HANG, Host, isolated};
use nix::errno::Errno;
use socket2::SockRef;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, BorrowedFd};

fn open(host: &Host, interface: &str) -> PathSocket {
    host.in_ns(|| PathSocket::open(Some(interface), None, 0, 0).expect("open"))
}

fn address(socket: &PathSocket, ip: &str) -> SocketAddr {
    let ip: IpAddr = ip.parse().expect("address");
    let port = socket.local_addr(Family::of(ip)).expect("open").port();
    SocketAddr::new(ip, port)
}

fn batch(len: usize) -> Vec<u8> {
    (0..len)
        .map(|index| (index % 251) as u8 ^ (index >> 9) as u8)
        .collect()
}

fn sent_all(outcome: &SendOutcome, len: usize) -> bool {
    outcome.sent == len && outcome.stop.is_none()
}

/// A run as it arrived: local address, stride, bytes.
type Run = (Option<IpAddr>, usize, Vec<u8>);

/// Receives until `len` bytes are here.
fn receive(socket: &mut PathSocket, family: Family, len: usize) -> (Vec<Run>, SocketAddr) {
    let mut poller = Poller::new().expect("epoll");
    poller
        .add(socket.fd(family).expect("open"), 0, Interest::Read)
        .expect("add");
    let mut received = RecvBatch::new();
    let (mut runs, mut have, mut from) = (Vec::new(), 0, None);
    while have < len {
        poller.wait(Some(HANG)).expect("wait");
        assert!(
            poller.events().next().is_some(),
            "{have} of {len} bytes came"
        );
        socket.recv(family, &mut received).expect("recv");
        for run in received.iter_mut() {
            have += run.bytes.len();
            from = Some(run.remote);
            runs.push((run.local, run.stride, run.bytes.to_vec()));
        }
    }
    (runs, from.expect("something came"))
}

fn joined(runs: &[Run]) -> Vec<u8> {
    runs.iter()
        .flat_map(|(_, _, bytes)| bytes.clone())
        .collect()
}

fn nothing_waits(socket: &mut PathSocket, family: Family) -> bool {
    let result = socket.recv(family, &mut RecvBatch::new());
    matches!(result, Err(error) if error.kind() == ErrorKind::WouldBlock)
}

fn runs_arrive_as_runs(here: &str, there: &str) -> Result<()> {
    let (a, b) = two_hosts()?;
    let (mut near, mut far) = (open(&a, "v"), open(&b, "v"));
    let to = address(&far, there);
    let family = Family::of(to.ip());
    // More than one call takes: 64 segments each, the last run short, the last datagram too.
    let data = batch(150 * 1000 + 700);
    assert!(sent_all(&near.send(to, &data, 1000), data.len()));
    assert_eq!(near.counters().gso_sends, 3);
    assert_eq!(near.counters().sent_singly, 0);

    let (runs, from) = receive(&mut far, family, data.len());
    assert_eq!(from, address(&near, here));
    assert!(joined(&runs) == data);
    assert!(runs.len() < 10, "{} runs for 151 datagrams", runs.len());
    let local = there.parse().ok();
    assert!(runs.iter().all(|run| run.0 == local && run.1 == 1000));

    // A single datagram, and back from the address that it was sent to.
    let back = Endpoint {
        local,
        ..Endpoint::from(from)
    };
    assert!(sent_all(&far.send(back, b"answer", 1000), 6));
    let (runs, from) = receive(&mut near, family, 6);
    assert_eq!((joined(&runs).as_slice(), from), (&b"answer"[..], to));
    assert_eq!(runs[0].1, 6);
    assert!(near.offloads(family) && nothing_waits(&mut near, family));
    Ok(())
}

#[test]
fn runs_arrive_as_runs_ipv4() {
    isolated(|| runs_arrive_as_runs("10.0.1.1", "10.0.1.2"));
}

#[test]
fn runs_arrive_as_runs_ipv6() {
    isolated(|| runs_arrive_as_runs("fd00:1::1", "fd00:1::2"));
}

/// Makes the kernel refuse segmentation with EINVAL, and nothing else: it has to checksum.
#[allow(unsafe_code)]
fn forbid_checksums(socket: &PathSocket, forbid: bool) {
    let value = i32::from(forbid);
    let fd = socket.fd(Family::V4).expect("open").as_raw_fd();
    // SAFETY: the option's value is an int that outlives the call.
    let result = unsafe {
        let value = std::ptr::from_ref(&value).cast();
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, value, 4)
    };
    assert_eq!(result, 0);
}

#[test]
fn refused_runs_go_out_singly() {
    isolated(|| {
        let (a, b) = two_hosts()?;
        let (mut near, mut far) = (open(&a, "v"), open(&b, "v"));
        let to = address(&far, "10.0.1.2");
        let local = "10.0.1.1".parse().ok();
        let data = batch(100 * 1200 + 5);
        forbid_checksums(&near, true);
        for to in [
            Endpoint::from(to),
            Endpoint {
                local,
                ..Endpoint::from(to)
            },
        ] {
            assert!(sent_all(&near.send(to, &data, 1200), data.len()));
            let (runs, _) = receive(&mut far, Family::V4, data.len());
            assert!(joined(&runs) == data, "the same data, in order");
        }
        let counters = near.counters();
        assert_eq!(
            (counters.gso_sends, counters.gso_refused),
            (0, 1),
            "{counters:?}"
        );
        assert_eq!(
            (counters.sent_singly, counters.local_lost),
            (202, 0),
            "{counters:?}"
        );
        assert!(!near.offloads(Family::V4));

        // Tried again later by itself, and found to work.
        forbid_checksums(&near, false);
        let sends = (1..100).find(|_| {
            assert!(sent_all(&near.send(to, &data[..2400], 1200), 2400));
            receive(&mut far, Family::V4, 2400);
            near.offloads(Family::V4)
        });
        assert!(sends.is_some_and(|sends| sends > 5), "{sends:?}");
        assert_eq!(near.counters().gso_sends, 1);
        Ok(())
    });
}

#[test]
fn too_big_is_reported_with_its_size() {
    isolated(|| {
        let (a, b) = two_hosts()?;
        ip(&a, "link set v mtu 1400");
        let (mut near, mut far) = (open(&a, "v"), open(&b, "v"));
        for (ip, largest) in [("10.0.1.2", 1400 - 28), ("fd00:1::2", 1400 - 48)] {
            let to = address(&far, ip);
            let family = Family::of(to.ip());
            let data = batch(3 * (largest + 1));
            for segment in [largest + 1, 3 * largest] {
                let outcome = near.send(to, &data, segment);
                assert_eq!(outcome.sent, 0);
                assert!(matches!(outcome.stop, Some(Stop::TooBig { size }) if size == segment));
            }
            let outcome = near.send(to, &data[..largest + 1], 9000);
            assert!(matches!(outcome.stop, Some(Stop::TooBig { size }) if size == largest + 1));
            assert!(
                near.offloads(family),
                "the datagrams are at fault, not the offload"
            );

            // ICMP would tell the same of a path further on; not a byte of it was sent in pieces.
            assert!(sent_all(&near.send(to, &data, largest), data.len()));
            let (runs, _) = receive(&mut far, family, data.len());
            assert!(joined(&runs) == data);
        }
        assert_eq!(near.counters().gso_refused, 0);
        assert_eq!(near.counters().gso_sends, 2);
        Ok(())
    });
}

#[allow(unsafe_code)]
fn option(fd: BorrowedFd<'_>, level: i32, name: i32) -> i32 {
    let (mut value, mut len) = (0, 4);
    // SAFETY: value and length are ints that outlive the call, and the length is the value's.
    let result = unsafe {
        let value = std::ptr::from_mut(&mut value).cast();
        libc::getsockopt(fd.as_raw_fd(), level, name, value, &mut len)
    };
    assert_eq!(result, 0);
    value
}

#[test]
fn mark_and_options_are_set() {
    isolated(|| {
        let host = Host::new("a")?;
        ip(&host, "link add v type veth peer name w");
        let mark = 0x3f00_0000;
        let socket = host.in_ns(|| PathSocket::open(Some("v"), None, 0, mark).expect("open"));
        let v4 = socket.fd(Family::V4).expect("IPv4");
        let v6 = socket.fd(Family::V6).expect("IPv6");
        assert_eq!(
            address(&socket, "0.0.0.0").port(),
            address(&socket, "::").port()
        );
        for fd in [v4, v6] {
            let reference = SockRef::from(&fd);
            assert_eq!(reference.mark().expect("mark"), mark);
            assert_eq!(
                reference.device().expect("device").as_deref(),
                Some(&b"v"[..])
            );
            assert!(reference.nonblocking().expect("flags"));
            let (receive, send) = (reference.recv_buffer_size(), reference.send_buffer_size());
            // More than is set without asking; how much depends on the system's limits.
            let usual = host.in_ns(|| UdpSocket::bind("0.0.0.0:0").expect("bind"));
            let usual = SockRef::from(&usual).recv_buffer_size().expect("size");
            assert!(receive.expect("size") > usual && send.expect("size") > usual);
        }
        assert!(SockRef::from(&v6).only_v6().expect("option"));
        let (ip, ipv6, probe) = (
            libc::IPPROTO_IP,
            libc::IPPROTO_IPV6,
            libc::IP_PMTUDISC_PROBE,
        );
        assert_eq!(option(v4, ip, libc::IP_MTU_DISCOVER), probe);
        assert_eq!(option(v6, ipv6, libc::IPV6_MTU_DISCOVER), probe);
        assert_eq!(option(v6, ipv6, libc::IPV6_DONTFRAG), 1);
        assert_eq!(option(v4, libc::SOL_UDP, libc::UDP_GRO), 1);
        Ok(())
    });
}

#[test]
fn bound_interface_is_never_left() {
    isolated(|| {
        let (a, b) = two_hosts()?;
        join((&a, &b), "w", 2)?;
        let mut far = b.in_ns(|| PathSocket::open(None, None, 0, 0).expect("open"));
        let to = address(&far, "10.0.1.2");
        let mut near = open(&a, "v");
        let data = batch(5000);
        assert!(sent_all(&near.send(to, &data, 1000), data.len()));
        receive(&mut far, Family::V4, data.len());

        ip(&a, "link set v down");
        ip(&a, "route add 10.0.1.0/24 via 10.0.2.2 dev w");
        for len in [1000, 5000] {
            let outcome = near.send(to, &data[..len], 1000);
            assert_eq!(outcome.sent, 0);
            let Some(Stop::Path(error)) = outcome.stop else {
                panic!("{:?}", outcome.stop)
            };
            assert_eq!(error.raw_os_error(), Some(Errno::ENETUNREACH as i32));
        }
        assert!(
            near.offloads(Family::V4),
            "the path is at fault, not the offload"
        );
        // Others do reach it by the other link, and theirs is the only datagram that comes.
        let other = a.in_ns(|| UdpSocket::bind("0.0.0.0:0").expect("bind"));
        other.send_to(b"round", to).expect("there is a way round");
        let (runs, from) = receive(&mut far, Family::V4, 5);
        assert_eq!(
            (joined(&runs).as_slice(), from.ip().to_string()),
            (&b"round"[..], "10.0.2.1".into())
        );
        assert!(nothing_waits(&mut far, Family::V4));

        // The device gone for good is an error as well, not a way out.
        ip(&a, "link del v");
        assert!(matches!(
            near.send(to, &data, 1000).stop,
            Some(Stop::Path(_))
        ));
        assert!(nothing_waits(&mut far, Family::V4));
        Ok(())
    });
}

#[test]
fn answers_come_from_the_address_asked() {
    isolated(|| {
        let (a, b) = two_hosts()?;
        ip(&b, "addr add 10.0.1.77/24 dev v");
        ip(&b, "addr add fd00:1::77/64 dev v nodad");
        let (mut near, mut far) = (open(&a, "v"), open(&b, "v"));
        for (second, last) in [("10.0.1.77", "10.0.1.2"), ("fd00:1::77", "")] {
            let to = address(&far, second);
            let family = Family::of(to.ip());
            assert!(sent_all(&near.send(to, b"hello", 5), 5));
            let (runs, remote) = receive(&mut far, family, 5);
            let back = Endpoint {
                local: runs[0].0,
                ..Endpoint::from(remote)
            };
            assert_eq!(back.local, Some(to.ip()));
            for len in [100, 3000] {
                assert!(sent_all(&far.send(back, &batch(len), 1000), len));
                assert_eq!(receive(&mut near, family, len).1, to);
            }
            // The address goes: the kernel's choice, and the offload is not blamed.
            let prefix = if last.is_empty() { 64 } else { 24 };
            ip(&b, &format!("addr del {second}/{prefix} dev v"));
            let outcome = far.send(back, &batch(3000), 1000);
            assert!(sent_all(&outcome, 3000), "{outcome:?}");
            let from = receive(&mut near, family, 3000).1;
            assert!(from != to && from.port() == to.port(), "{from}");
            assert!(far.offloads(family));
        }
        assert_eq!(far.counters().local_lost, 2);
        assert_eq!(far.counters().gso_refused, 0);
        Ok(())
    });
}

#[test]
fn full_buffer_keeps_the_rest() {
    isolated(|| {
        let (a, b) = two_hosts()?;
        // A slow qdisc holds what was sent, so that the send buffer fills.
        a.run("tc qdisc add dev v root tbf rate 8mbit burst 10000 limit 100000000")?;
        let (mut near, mut far) = (open(&a, "v"), open(&b, "v"));
        let fd = near.fd(Family::V4).expect("open");
        SockRef::from(&fd)
            .set_send_buffer_size(100_000)
            .expect("size");
        let to = address(&far, "10.0.1.2");
        let data = batch(600_000);
        let mut poller = Poller::new().expect("epoll");
        poller
            .add(near.fd(Family::V4).expect("open"), 0, Interest::ReadWrite)
            .expect("add");
        let (mut sent, mut blocked) = (0, 0);
        while sent < data.len() {
            let outcome = near.send(to, &data[sent..], 1200);
            sent += outcome.sent;
            match outcome.stop {
                None => assert_eq!(sent, data.len()),
                Some(Stop::Blocked) => {
                    assert_eq!(sent % 1200, 0, "whole datagrams");
                    blocked += 1;
                    poller.wait(Some(HANG)).expect("wait");
                    assert!(poller.events().any(|event| event.writable), "it drains");
                }
                Some(other) => panic!("{other:?}"),
            }
        }
        assert!(blocked > 0);
        let (runs, _) = receive(&mut far, Family::V4, data.len());
        assert!(
            joined(&runs) == data,
            "nothing lost, nothing twice, in order"
        );
        Ok(())
    });
}

#[test]
fn overflow_is_counted() {
    isolated(|| {
        let (a, b) = two_hosts()?;
        let (mut near, mut far) = (open(&a, "v"), open(&b, "v"));
        let fd = far.fd(Family::V4).expect("open");
        SockRef::from(&fd)
            .set_recv_buffer_size(20_000)
            .expect("size");
        let to = address(&far, "10.0.1.2");
        // The first waits for the neighbour's address; the queue for that is short.
        assert!(sent_all(&near.send(to, b"first", 5), 5));
        receive(&mut far, Family::V4, 5);
        // A run that finds the buffer full is dropped as one.
        let runs = 3 * RECV_BATCH;
        for _ in 0..runs {
            assert!(sent_all(&near.send(to, &batch(30_000), 1000), 30_000));
        }
        let first = receive(&mut far, Family::V4, 30_000).0.len();
        // The count comes with what arrives after the drops.
        assert!(sent_all(&near.send(to, b"after", 5), 5));
        receive(&mut far, Family::V4, 5);
        let overflowed = far.counters().overflowed as usize;
        assert!(
            first < runs && overflowed >= runs - first,
            "{first} runs, {overflowed} dropped"
        );
        Ok(())
    });
}

#[test]
fn refused_port_is_no_error() {
    isolated(|| {
        let (a, b) = two_hosts()?;
        let mut near = open(&a, "v");
        for ip in ["10.0.1.2:9", "[fd00:1::2]:9"] {
            let to: SocketAddr = ip.parse().expect("address");
            for _ in 0..5 {
                assert!(sent_all(&near.send(to, &batch(2000), 1000), 2000));
            }
            assert!(nothing_waits(&mut near, Family::of(to.ip())));
        }
        let counted = b.run("cat /proc/thread-self/net/snmp")?;
        assert!(counted.contains("OutDestUnreachs"));
        Ok(())
    });
}

#[test]
fn open_names_what_failed() {
    isolated(|| {
        let host = Host::new("a")?;
        let error = host.in_ns(|| PathSocket::open(Some("none"), None, 5300, 0).map(drop));
        let error = error.expect_err("no such interface");
        assert_eq!(error.operation, "SO_BINDTODEVICE");
        assert_eq!(error.error.raw_os_error(), Some(Errno::ENODEV as i32));
        let address = "192.0.2.1".parse().ok();
        let error = host.in_ns(|| PathSocket::open(None, address, 5300, 0).map(drop));
        let error = error.expect_err("not our address");
        assert_eq!(
            (error.operation, error.target.as_str()),
            ("bind", "192.0.2.1:5300")
        );

        // An address decides the family.
        let v4_only = "10.0.9.1".parse().ok();
        ip(&host, "addr add 10.0.9.1/32 dev lo");
        let mut socket = host.in_ns(|| PathSocket::open(Some("lo"), v4_only, 0, 0).expect("open"));
        assert!(socket.fd(Family::V6).is_none());
        let to: SocketAddr = "[::1]:9".parse().expect("address");
        assert!(matches!(socket.send(to, b"x", 1).stop, Some(Stop::Path(_))));
        Ok(())
    });
}

#[test]
fn does_not_allocate() {
    isolated(|| {
        let (a, b) = two_hosts()?;
        let (mut near, mut far) = (open(&a, "v"), open(&b, "v"));
        let to = address(&far, "10.0.1.2");
        let data = batch(60_000);
        let mut received = RecvBatch::new();
        for forbidden in [false, true] {
            forbid_checksums(&near, forbidden);
            let count = allocations::during(|| {
                for _ in 0..10 {
                    assert!(sent_all(&near.send(to, &data, 1200), data.len()));
                    assert!(
                        near.send(to, &data, 2000).stop.is_some(),
                        "more than the MTU"
                    );
                }
                while far.recv(Family::V4, &mut received).is_ok() {
                    assert!(received.iter_mut().all(|run| run.stride == 1200));
                }
            });
            assert_eq!(count, 0);
        }
        Ok(())
    });
}
