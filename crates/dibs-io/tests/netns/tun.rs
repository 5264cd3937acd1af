//! TCP between two hosts whose only link is a pair of TUNs with a forwarder between them.

use crate::{allocations, ip};
use dibs_io::{FRAME_MAX, Interest, Poller, Tun};
use dibs_netns::{Host, isolated};
use dibs_wire::virtio::{self, VirtioHdr};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::thread;

const BYTES: usize = 32 << 20;

/// Numbers that repeat after a prime, so that a piece out of place is seen.
fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len)
        .map(|index| (index % 65_521) as u8 ^ (index >> 13) as u8)
        .collect()
}

/// What the forwarder does to superpackets on their way from the first host.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Untouched,
    /// The other IP version's type, which the kernel refuses, in all but every 64th.
    Mistyped,
}

/// What the forwarder saw on the way from the first host, and what the far TUN counted.
struct Seen {
    longest: usize,
    superpackets: usize,
    tun: Tun,
}

/// Two hosts of which the second has a TUN made by `far`; sends BYTES from the first to the
/// second, checks them, and lets them be answered with their count.
fn transfer(ipv6: bool, far: fn(&str, u16) -> Tun, way: Way) -> Seen {
    let hosts = ["a", "b"].map(|name| Host::new(name).expect("a host"));
    let open = |name: &str, mtu| Tun::open(name, mtu).expect("TUN");
    let tuns = [
        hosts[0].in_ns(|| open("near", 65_535)),
        hosts[1].in_ns(|| far("far", 65_535)),
    ];
    let addresses: [IpAddr; 2] = match ipv6 {
        false => ["10.9.0.1", "10.9.0.2"],
        true => ["fd09::1", "fd09::2"],
    }
    .map(|address| address.parse().expect("address"));
    for (this, other) in [(0, 1), (1, 0)] {
        let name = tuns[this].name();
        let (address, peer) = (addresses[this], addresses[other]);
        hosts[this].in_ns(|| tuns[this].up()).expect("up");
        ip(
            &hosts[this],
            &format!("addr add {address} dev {name} nodad"),
        );
        ip(
            &hosts[this],
            &format!("route add {peer} dev {name} src {address} advmss 1400"),
        );
    }
    let [near, far] = tuns;
    let listener = hosts[1].in_ns(|| TcpListener::bind((addresses[1], 7000)).expect("bind"));
    let poller = Poller::new().expect("epoll");
    let stop = poller.waker(2).expect("waker");
    thread::scope(|scope| {
        let forwarder = scope.spawn(move || forward(poller, near, far, way));
        let receiver = scope.spawn(move || {
            let (mut stream, _) = listener.accept().expect("accept");
            let mut received = Vec::new();
            stream.read_to_end(&mut received).expect("read");
            stream
                .write_all(&(received.len() as u64).to_be_bytes())
                .expect("answer");
            received
        });
        let sent = pattern(0, BYTES);
        let mut stream =
            hosts[0].in_ns(|| TcpStream::connect((addresses[1], 7000)).expect("connect"));
        stream.write_all(&sent).expect("write");
        stream.shutdown(Shutdown::Write).expect("shutdown");
        let mut answer = [0; 8];
        stream.read_exact(&mut answer).expect("answer");
        assert_eq!(u64::from_be_bytes(answer), BYTES as u64);
        assert!(
            receiver.join().expect("receiver") == sent,
            "data came changed"
        );
        stop.wake();
        forwarder.join().expect("forwarder")
    })
}

/// Carries frames both ways until woken.
fn forward(mut poller: Poller, mut near: Tun, mut far: Tun, way: Way) -> Seen {
    poller.add(&near, 0, Interest::Read).expect("add");
    poller.add(&far, 1, Interest::Read).expect("add");
    let mut frame = vec![0; FRAME_MAX];
    let (mut longest, mut superpackets) = (0, 0);
    loop {
        poller.wait(None).expect("wait");
        for event in poller.events() {
            let (from, to) = match event.token {
                0 => (&near, &mut far),
                1 => (&far, &mut near),
                _ => {
                    return Seen {
                        longest,
                        superpackets,
                        tun: far,
                    };
                }
            };
            // A bounded share for each direction, as the daemon's loop does.
            for _ in 0..64 {
                let len = match from.recv(&mut frame) {
                    Ok(len) => len,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => panic!("read: {error}"),
                };
                let bytes = frame.first_chunk_mut().expect("header");
                let mut header = VirtioHdr::decode(bytes).expect("of TCP");
                if event.token == 0 && header.gso_size > 0 {
                    longest = longest.max(len - virtio::LEN);
                    superpackets += 1;
                    if way == Way::Mistyped && superpackets % 64 != 0 {
                        header.ipv6 = !header.ipv6;
                        header.encode(bytes);
                    }
                }
                let (first, rest) = frame[..len].split_at(virtio::LEN + 11);
                to.sendv(&[IoSlice::new(first), IoSlice::new(rest)])
                    .expect("write");
            }
        }
    }
}

fn offloaded(name: &str, mtu: u16) -> Tun {
    Tun::open(name, mtu).expect("TUN")
}

fn plain(name: &str, mtu: u16) -> Tun {
    Tun::open_plain(name, mtu).expect("TUN")
}

fn whole_superpackets(ipv6: bool) {
    let seen = transfer(ipv6, offloaded, Way::Untouched);
    assert!(
        seen.longest > 60_000,
        "longest of {}: {}",
        seen.superpackets,
        seen.longest
    );
    assert!(
        seen.superpackets * 65_535 > BYTES / 2,
        "only {}",
        seen.superpackets
    );
    assert!(seen.tun.offloads());
    assert_eq!(seen.tun.counters(), Default::default());
}

#[test]
fn carries_superpackets_ipv4() {
    isolated(|| {
        whole_superpackets(false);
        Ok(())
    });
}

#[test]
fn carries_superpackets_ipv6() {
    isolated(|| {
        whole_superpackets(true);
        Ok(())
    });
}

fn cut_in_software(ipv6: bool) {
    let seen = transfer(ipv6, plain, Way::Untouched);
    let counters = seen.tun.counters();
    assert!(!seen.tun.offloads());
    assert_eq!(counters.gso_refused, 0);
    assert_eq!(counters.superpackets_cut, seen.superpackets as u64);
    assert!(
        counters.segments_written >= (BYTES / 2 / 1400) as u64,
        "{counters:?}"
    );
}

#[test]
fn without_offload_carries_the_same_ipv4() {
    isolated(|| {
        cut_in_software(false);
        Ok(())
    });
}

#[test]
fn without_offload_carries_the_same_ipv6() {
    isolated(|| {
        cut_in_software(true);
        Ok(())
    });
}

#[test]
fn refused_superpackets_are_not_lost() {
    isolated(|| {
        let seen = transfer(false, offloaded, Way::Mistyped);
        let counters = seen.tun.counters();
        // Refused at first, then not even tried for a while, then tried again.
        assert!(counters.gso_refused >= 2, "{counters:?}");
        assert!(
            counters.superpackets_cut > 4 * counters.gso_refused,
            "{counters:?}"
        );
        assert!(
            counters.segments_written > 4 * counters.superpackets_cut,
            "{counters:?}"
        );
        Ok(())
    });
}

#[test]
fn is_noqueue_and_down_until_told() {
    isolated(|| {
        let host = Host::new("a")?;
        for open in [offloaded, plain] {
            let tun = host.in_ns(|| open("dibs%d", 65_535));
            let name = tun.name();
            assert!(name.starts_with("dibs") && !name.contains('%'), "{name}");
            let link = ip(&host, &format!("link show {name}"));
            assert!(!link.contains("UP") && link.contains("mtu 65535"), "{link}");
            assert!(link.starts_with(&tun.if_index().to_string()), "{link}");
            for _ in 0..2 {
                host.in_ns(|| tun.up()).expect("up");
                let link = ip(&host, &format!("link show {name}"));
                assert!(link.contains("UP") && link.contains("noqueue"), "{link}");
                assert!(
                    link.contains("qlen 4096"),
                    "the ring needs its length: {link}"
                );
                ip(&host, &format!("link set {name} down"));
            }
            drop(tun);
            assert!(!ip(&host, "link show").contains("dibs"));
        }
        Ok(())
    });
}

#[test]
fn errors_are_the_kernels() {
    isolated(|| {
        let host = Host::new("a")?;
        let mut tun = host.in_ns(|| offloaded("t", 1500));
        let code = |result: std::io::Result<()>| result.expect_err("refused").raw_os_error();
        let packet = [&[0; virtio::LEN][..], &[0x45; 40]].concat();
        assert_eq!(code(tun.send(&packet)), Some(nix::errno::Errno::EIO as i32));
        host.in_ns(|| tun.up()).expect("up");
        tun.send(&packet).expect("the link is up");

        // What cannot be read by anybody is refused and is not held against the offload.
        let of_size_zero = [0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        let broken = [&of_size_zero[..], &[0x45; 400]].concat();
        assert_eq!(
            code(tun.send(&broken)),
            Some(nix::errno::Errno::EINVAL as i32)
        );
        assert_eq!(
            code(tun.send(&[0; 3])),
            Some(nix::errno::Errno::EINVAL as i32)
        );
        assert!(tun.offloads());

        let error = host.in_ns(|| Tun::open("a-name-that-is-too-long", 1500).map(drop));
        let error = error.expect_err("refused").to_string();
        assert!(error.contains("a-name-that-is-too-long"), "{error}");
        let busy = host
            .in_ns(|| Tun::open("t", 1500).map(drop))
            .expect_err("taken");
        assert_eq!(
            busy.error.raw_os_error(),
            Some(nix::errno::Errno::EBUSY as i32)
        );
        Ok(())
    });
}

#[test]
fn does_not_allocate() {
    isolated(|| {
        assert_eq!(
            allocations::during(|| drop(std::hint::black_box(Box::new(1)))),
            1
        );
        let host = Host::new("a")?;
        for open in [offloaded, plain] {
            let mut tun = host.in_ns(|| open("t", 65_535));
            host.in_ns(|| tun.up()).expect("up");
            ip(&host, "addr add 10.9.0.1/24 dev t");
            let mut frame = vec![0; FRAME_MAX];
            let mut poller = Poller::new().expect("epoll");
            poller.add(&tun, 0, Interest::Read).expect("add");
            let socket = host.in_ns(|| UdpSocket::bind("10.9.0.1:0").expect("bind"));
            socket.send_to(&[7; 5000], "10.9.0.2:9").expect("send");
            let superpacket = superpacket(&[7; 60_000], 1400);
            let (first, rest) = superpacket.split_at(70);
            let count = allocations::during(|| {
                poller.wait(None).expect("wait");
                assert!(poller.events().next().is_some());
                while tun.recv(&mut frame).is_ok() {}
                for _ in 0..20 {
                    tun.sendv(&[IoSlice::new(first), IoSlice::new(rest)])
                        .expect("send");
                }
            });
            assert_eq!(count, 0);
            assert_eq!(tun.offloads(), tun.counters().superpackets_cut == 0);
        }
        Ok(())
    });
}

/// A frame with a TCP superpacket over IPv4 for nobody here; checksums are left to the kernel.
fn superpacket(payload: &[u8], mss: u16) -> Vec<u8> {
    let header = VirtioHdr {
        needs_csum: true,
        gso_size: mss,
        hdr_len: 40,
        csum_start: 20,
        csum_offset: 16,
        ..VirtioHdr::default()
    };
    let mut bytes = [0; virtio::LEN];
    header.encode(&mut bytes);
    let mut packet = [0; 40];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&(40 + payload.len() as u16).to_be_bytes());
    packet[8..10].copy_from_slice(&[64, 6]);
    packet[12..20].copy_from_slice(&[10, 9, 0, 7, 10, 9, 0, 1]);
    packet[32] = 5 << 4;
    [&bytes, &packet[..], payload].concat()
}
