//! Links that limit, delay, lose and reorder, measured on the real kernel.

use std::collections::BTreeSet;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_lab::load::{Latency, Throughput};
use dibs_lab::{Conditions, End, Host, Lab, Link, LinkSpec, isolated, isolated_alone, wait_until};
use nix::sys::socket::{setsockopt, sockopt::UdpGsoSegment};

const MS: Duration = Duration::from_millis(1);
const SOON: Duration = Duration::from_secs(5);

fn address() -> SocketAddr {
    "10.0.1.2:700".parse().unwrap()
}

fn spec(a: &Host, b: &Host) -> LinkSpec {
    LinkSpec::new(a, "eth0", "10.0.1.1/24", b, "eth0", "10.0.1.2/24")
}

fn emulated(conditions: Conditions) -> Result<(Lab, Host, Host, Link)> {
    let mut lab = Lab::new()?;
    let (a, b) = (lab.host("a")?, lab.host("b")?);
    let link = lab.link(spec(&a, &b).emulated(conditions).seed(7))?;
    Ok((lab, a, b, link))
}

/// Bytes of memory for what a reader has not read.
const ROOM: usize = 32 << 20;

/// Sends numbered datagrams from `a` to `b`, one each `spacing`; returns the numbers that arrive, in
/// that order, once they have stopped arriving.
fn datagrams(a: &Host, b: &Host, count: u32, spacing: Duration) -> Result<Vec<u32>> {
    let receiver = b.in_ns(|| UdpSocket::bind(address()))?;
    receiver.set_read_timeout(Some(Duration::from_millis(500)))?;
    // A reader that does not get the processor for a while must not look like loss.
    nix::sys::socket::setsockopt(&receiver, nix::sys::socket::sockopt::RcvBufForce, &ROOM)?;
    let sender = a.in_ns(|| UdpSocket::bind("10.0.1.1:0"))?;
    let reader = std::thread::spawn(move || {
        let mut numbers = Vec::new();
        let mut datagram = [0; 100];
        while receiver.recv(&mut datagram).is_ok() {
            numbers.push(u32::from_be_bytes(
                datagram[..4].try_into().expect("four bytes"),
            ));
        }
        numbers
    });
    let start = Instant::now();
    for n in 0..count {
        while start.elapsed() < n * spacing {
            std::hint::spin_loop();
        }
        let mut datagram = [0; 100];
        datagram[..4].copy_from_slice(&n.to_be_bytes());
        sender.send_to(&datagram, address())?;
    }
    Ok(reader.join().expect("the reader does not panic"))
}

fn tcp(a: &Host, b: &Host, seconds: f64) -> Result<f64> {
    let report = Throughput::new(address())
        .duration(Duration::from_secs_f64(seconds))
        .run(a, b)?;
    println!("{}", serde_json::to_string(&report)?);
    Ok(report.bits_per_second / 1e6)
}

/// TCP's payload is at least 94.9 % of the frames' bytes at an MTU of 1500.
fn assert_rate(measured: f64, megabits: f64) {
    let share = measured / megabits;
    assert!(
        (0.90..0.97).contains(&share),
        "{measured} of {megabits} Mbit/s"
    );
}

#[test]
fn shaped_links_carry_their_rate() {
    isolated_alone(|| {
        let mut lab = Lab::new()?;
        let (a, b) = (lab.host("a")?, lab.host("b")?);
        let link = lab.link(spec(&a, &b).shaped(100_000_000))?;
        assert_rate(tcp(&a, &b, 2.0)?, 100.0);
        link.shape(1_000_000_000)?;
        assert_rate(tcp(&a, &b, 2.0)?, 1000.0);
        Ok(())
    });
}

#[test]
fn emulated_links_carry_their_rate() {
    isolated_alone(|| {
        let (_lab, a, b, link) = emulated(Conditions::new().rate(20_000_000))?;
        assert_rate(tcp(&a, &b, 2.0)?, 20.0);
        link.set(|conditions| conditions.rate = Some(300_000_000))?;
        assert_rate(tcp(&a, &b, 2.0)?, 300.0);
        link.set(|conditions| conditions.rate = Some(100_000_000))?;
        link.set(|conditions| conditions.delay = 10 * MS)?;
        assert_rate(tcp(&a, &b, 3.0)?, 100.0);
        for end in End::BOTH {
            let stats = link.stats(end)?;
            assert_eq!((stats.oversized, stats.overruns), (0, 0), "{stats:?}");
        }
        Ok(())
    });
}

/// Segments that TCP of a host got ahead of others.
fn early(host: &Host) -> Result<u64> {
    let printed = host.run("nstat -asz TcpExtTCPOFOQueue")?;
    let mut words = printed.split_ascii_whitespace();
    words.find(|word| word.ends_with("Queue"));
    Ok(words.next().context("nstat tells a number")?.parse()?)
}

#[test]
fn superpackets_take_their_time_and_keep_their_order() {
    isolated_alone(|| {
        let mut lab = Lab::new()?;
        let (a, b) = (lab.host("a")?, lab.host("b")?);
        let conditions = Conditions::new().rate(1_000_000_000).delay(5 * MS);
        let link = lab.link(spec(&a, &b).emulated(conditions).superpackets())?;
        assert_rate(tcp(&a, &b, 3.0)?, 1000.0);
        assert_eq!(early(&b)?, 0);
        let stats = link.stats(End::A)?;
        println!("{stats:?}");
        assert!(stats.bytes > 10_000 * stats.delivered, "{stats:?}");
        assert_eq!(stats.overruns, 0, "{stats:?}");

        let refused = link.set(|conditions| conditions.loss = 0.01);
        assert!(refused.unwrap_err().to_string().contains("superpackets"));
        link.set(|conditions| conditions.rate = Some(50_000_000))?;
        assert_rate(tcp(&a, &b, 2.0)?, 50.0);
        Ok(())
    });
}

#[test]
fn the_delay_is_each_ways() {
    isolated(|| {
        let (_lab, a, b, _link) = emulated(Conditions::new().delay(10 * MS))?;
        let report = Latency::new(address()).duration(100 * MS).run(&a, &b)?;
        println!("{}", serde_json::to_string(&report)?);
        assert!(report.min_us >= 10_000.0, "{report:?}");
        // The least: what the machine adds comes and goes.
        assert!(report.min_us < 15_000.0, "{report:?}");
        Ok(())
    });
}

#[test]
fn each_datagram_is_lost_for_itself() {
    isolated(|| {
        let (_lab, a, b, link) = emulated(Conditions::new())?;
        // One direction only: the answers to ARP must not be lost.
        link.set_from(End::A, |conditions| conditions.loss = 0.1)?;
        a.run("ip neighbour replace 10.0.1.2 lladdr 02:00:00:00:00:02 dev eth0")?;
        b.run("ip link set eth0 address 02:00:00:00:00:02")?;
        let arrived = datagrams(&a, &b, 10_000, MS / 20)?;
        let lost = 10_000 - arrived.len();
        assert!((900..1100).contains(&lost), "{lost} of 10,000");
        assert!(arrived.is_sorted());
        let stats = link.stats(End::A)?;
        // The interface's own change may have cost one more.
        let missing = stats.lost + stats.undeliverable;
        assert!(missing >= lost as u64, "{lost}, {stats:?}");
        // Single losses prevail; a superpacket's loss would take its neighbours along.
        let arrived: BTreeSet<u32> = arrived.into_iter().collect();
        let lost: Vec<u32> = (0..10_000).filter(|n| !arrived.contains(n)).collect();
        let alone = lost
            .windows(2)
            .filter(|pair| pair[1] != pair[0] + 1)
            .count();
        assert!(alone * 10 > lost.len() * 8, "{alone} of {}", lost.len());
        Ok(())
    });
}

#[test]
fn losses_hit_single_datagrams_of_a_batch() {
    isolated(|| {
        let (_lab, a, b, link) = emulated(Conditions::new())?;
        assert_eq!(datagrams(&a, &b, 1, MS)?.len(), 1);
        link.set_from(End::A, |conditions| conditions.loss = 0.2)?;
        let receiver = b.in_ns(|| UdpSocket::bind(address()))?;
        receiver.set_read_timeout(Some(Duration::from_millis(500)))?;
        let sender = a.in_ns(|| UdpSocket::bind("10.0.1.1:0"))?;
        // UDP_SEGMENT: one call hands over ten datagrams.
        setsockopt(&sender, UdpGsoSegment, &100)?;
        for _ in 0..30 {
            sender.send_to(&[0; 1000], address())?;
        }
        let mut datagram = [0; 1000];
        let mut arrived = 0;
        while let Ok(len) = receiver.recv(&mut datagram) {
            assert_eq!(len, 100);
            arrived += 1;
        }
        assert!((200..280).contains(&arrived), "{arrived} of 300");
        assert_eq!(link.stats(End::A)?.oversized, 0);
        Ok(())
    });
}

#[test]
fn losses_hit_single_segments_of_a_superpacket() {
    isolated(|| {
        let conditions = Conditions::new().rate(100_000_000).loss(0.01);
        let (_lab, a, b, link) = emulated(conditions)?;
        let report = Throughput::new(address()).duration(2000 * MS).run(&a, &b)?;
        let stats = link.stats(End::A)?;
        println!("{} {stats:?}", serde_json::to_string(&report)?);
        assert_eq!(stats.oversized, 0);
        assert!(
            stats.entered > report.bytes / 1448,
            "superpackets passed: {stats:?}"
        );
        let share = stats.lost as f64 / stats.entered as f64;
        assert!((0.005..0.015).contains(&share), "{share}");
        assert!(
            report.retransmissions >= stats.lost / 2,
            "TCP has seen the losses"
        );
        Ok(())
    });
}

#[test]
fn reordering_duplication_and_order() {
    isolated(|| {
        let conditions = Conditions::new().reorder(0.05, 3 * MS).duplicate(0.05);
        let (_lab, a, b, link) = emulated(conditions)?;
        let arrived = datagrams(&a, &b, 4000, MS / 4)?;
        let stats = link.stats(End::A)?;
        let distinct: BTreeSet<&u32> = arrived.iter().collect();
        assert_eq!(distinct.len(), 4000);
        let twice = arrived.len() - distinct.len();
        assert!((140..260).contains(&twice), "{twice} of 4,000 came twice");
        let overtaken = arrived.windows(2).filter(|pair| pair[1] < pair[0]).count();
        assert!(
            (120..260).contains(&overtaken),
            "{overtaken} of 4,000 were overtaken: {stats:?}"
        );

        link.set(|conditions| *conditions = Conditions::new().delay(5 * MS).jitter(2 * MS))?;
        let arrived = datagrams(&a, &b, 2000, MS / 4)?;
        ensure!(
            arrived.len() == 2000 && arrived.is_sorted(),
            "jitter keeps the order"
        );
        Ok(())
    });
}

#[test]
fn flipped_bits_are_for_the_receiver_to_notice() {
    isolated(|| {
        let (_lab, a, b, link) = emulated(Conditions::new().rate(100_000_000))?;
        let transfer = Throughput::new(address())
            .duration(2000 * MS)
            .start(&a, &b)?;
        link.set_from(End::A, |conditions| conditions.corrupt = 0.005)?;
        // The transfer compares every byte.
        let report = transfer.finish()?;
        let stats = link.stats(End::A)?;
        assert!(stats.corrupted > 20, "{stats:?}");
        assert!(report.retransmissions >= stats.corrupted / 2, "{report:?}");
        Ok(())
    });
}

#[test]
fn an_outage_stops_everything_and_ends() {
    isolated(|| {
        let (_lab, a, b, link) = emulated(Conditions::new().rate(100_000_000).delay(MS))?;
        let transfer = Throughput::new(address())
            .duration(3000 * MS)
            .start(&a, &b)?;
        wait_until(SOON, "a start", || transfer.received() > 1_000_000)?;
        let outage = {
            let start = link.elapsed()? + 50 * MS;
            start..start + 400 * MS
        };
        link.set(|conditions| conditions.outages.push(outage.clone()))?;
        let report = transfer.finish()?;
        println!("{}", serde_json::to_string(&report)?);
        assert!(report.longest_gap_us > 300_000, "{}", report.longest_gap_us);
        assert!(
            report.longest_gap_us < 1_500_000,
            "{}",
            report.longest_gap_us
        );
        assert!(link.stats(End::A)?.outage_dropped > 0);

        link.set(|conditions| conditions.outage = true)?;
        assert!(datagrams(&a, &b, 10, MS)?.is_empty());
        link.set(|conditions| conditions.outage = false)?;
        assert_eq!(datagrams(&a, &b, 10, MS)?.len(), 10);
        Ok(())
    });
}

#[test]
fn links_and_recordings_end_while_processes_run() {
    isolated(|| {
        let (_lab, a, b, link) = emulated(Conditions::new())?;
        let capture = a.capture("eth0")?;
        let mut sleep = b.command("sleep");
        sleep.arg("1000");
        let mut process = b.spawn(sleep)?;
        // Both stop threads of theirs by closing a pipe, which the process must not hold.
        drop(capture);
        drop(link);
        assert!(process.is_running());
        Ok(())
    });
}

#[test]
fn the_queue_is_bounded() {
    isolated(|| {
        // 100 ms of 1 Mbit/s: about 88 datagrams of 142 bytes as frames.
        let (_lab, a, b, link) = emulated(Conditions::new())?;
        assert_eq!(datagrams(&a, &b, 1, MS)?.len(), 1);
        link.set_from(End::A, |c| {
            (c.rate, c.queue) = (Some(1_000_000), Some(12_500))
        })?;
        let arrived = datagrams(&a, &b, 500, Duration::ZERO)?.len();
        assert!((80..130).contains(&arrived), "{arrived}");
        assert_eq!(link.stats(End::A)?.queue_dropped, 500 - arrived as u64);
        Ok(())
    });
}

#[test]
fn the_same_seed_loses_the_same_datagrams() {
    isolated(|| {
        let run = || -> Result<Vec<u32>> {
            let mut lab = Lab::new()?;
            let (a, b) = (lab.host("a")?, lab.host("b")?);
            // Nothing but the datagrams may enter: each packet moves the dice on by one.
            for host in [&a, &b] {
                host.sysctl("net.ipv6.conf.default.disable_ipv6", "1")?;
            }
            let link = lab.link(spec(&a, &b).emulated(Conditions::new().loss(0.2)).seed(7))?;
            for (host, other) in [(&a, "10.0.1.2"), (&b, "10.0.1.1")] {
                host.run("ip link set eth0 address 02:00:00:00:00:01")?;
                let neighbour = format!("{other} lladdr 02:00:00:00:00:01 dev eth0");
                host.run(&format!("ip neighbour replace {neighbour}"))?;
            }
            let arrived = datagrams(&a, &b, 1000, MS / 10)?;
            assert_eq!(link.stats(End::A)?.entered, 1000);
            Ok(arrived)
        };
        let first = run()?;
        assert!((700..900).contains(&first.len()));
        assert_eq!(first, run()?);
        Ok(())
    });
}
