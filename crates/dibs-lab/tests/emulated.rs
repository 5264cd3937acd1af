//! Links that limit, delay, lose and reorder, on the real kernel. When frames come out is tested in virtual time,
//! with the emulator and the wire; here it is that they do, which of them, and not before their time.

use std::collections::BTreeSet;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_lab::load::{Latency, Throughput, Transport};
use dibs_lab::{Capture, Conditions, End, Lab, Link, LinkSpec, WireStats};
use dibs_netns::{HANG, Host};
use dibs_netns::{isolated, wait_for, wait_until};
use nix::sys::socket::{setsockopt, sockopt::UdpGsoSegment};

const MS: Duration = Duration::from_millis(1);

fn address() -> SocketAddr {
    "10.0.1.2:700".parse().unwrap()
}

fn spec(a: &Host, b: &Host) -> LinkSpec {
    LinkSpec::new(a, "eth0", "10.0.1.1/24", b, "eth0", "10.0.1.2/24")
}

/// An emulated link on which nothing but what the test sends passes: each packet moves the dice on by one.
fn quiet(make: impl FnOnce(LinkSpec) -> LinkSpec) -> Result<(Lab, Host, Host, Link)> {
    let mut lab = Lab::new()?;
    let (a, b) = (lab.host("a")?, lab.host("b")?);
    for host in [&a, &b] {
        host.sysctl("net.ipv6.conf.default.disable_ipv6", "1")?;
    }
    let link = lab.link(make(spec(&a, &b).seed(7)))?;
    for (host, own, other, address) in [(&a, 1, 2, "10.0.1.2"), (&b, 2, 1, "10.0.1.1")] {
        host.run(&format!("ip link set eth0 address 02:00:00:00:00:0{own}"))?;
        let neighbour = format!("{address} lladdr 02:00:00:00:00:0{other} dev eth0");
        host.run(&format!("ip neighbour replace {neighbour}"))?;
    }
    Ok((lab, a, b, link))
}

fn emulated(conditions: Conditions) -> Result<(Lab, Host, Host, Link)> {
    quiet(|spec| spec.emulated(conditions))
}

/// Bytes of memory for what a reader has not read.
const ROOM: usize = 32 << 20;
/// The payload of the last datagram.
const END: u32 = u32::MAX;

/// Packets of which it is not yet known what becomes of them.
fn under_way(stats: &WireStats) -> u64 {
    let done = [
        stats.delivered,
        stats.lost,
        stats.queue_dropped,
        stats.outage_dropped,
        stats.oversized,
        stats.undeliverable,
    ];
    stats.entered + stats.duplicated - done.iter().sum::<u64>()
}

/// Sends numbered datagrams of 100 bytes from `a` to `b`, `batch` by one call, a call each `spacing`. Returns the
/// numbers that arrive, in that order, and what became of the packets meanwhile.
fn batches(
    (a, b, link): (&Host, &Host, &Link),
    count: u32,
    batch: u32,
    spacing: Duration,
) -> Result<(Vec<u32>, WireStats)> {
    let receiver = b.in_ns(|| UdpSocket::bind(address()))?;
    receiver.set_read_timeout(Some(HANG))?;
    // A reader that does not get the processor for a while must not look like loss.
    setsockopt(&receiver, nix::sys::socket::sockopt::RcvBufForce, &ROOM)
        .or_else(|_| setsockopt(&receiver, nix::sys::socket::sockopt::RcvBuf, &ROOM))?;
    let sender = a.in_ns(|| UdpSocket::bind("10.0.1.1:0"))?;
    // UDP_SEGMENT: one call hands over a batch.
    setsockopt(&sender, UdpGsoSegment, &100)?;
    let before = link.stats(End::A)?;
    let start = Instant::now();
    for call in 0..count / batch {
        while start.elapsed() < call * spacing {
            std::hint::spin_loop();
        }
        let numbers = call * batch..(call + 1) * batch;
        let datagrams: Vec<u8> = numbers.clone().flat_map(datagram).collect();
        sender.send_to(&datagrams, address())?;
        // No more than the queues between here and the link hold.
        let entered = u64::from(numbers.end.saturating_sub(200));
        wait_until(HANG, "datagrams to enter the link", || {
            link.stats(End::A)
                .is_ok_and(|stats| stats.entered + stats.overruns >= before.entered + entered)
        })?;
    }
    let stats = wait_for(HANG, "all datagrams to meet their fates", || {
        let stats = link.stats(End::A).ok()?;
        let all = before.entered + u64::from(count);
        (stats.entered == all && under_way(&stats) == 0).then_some(stats)
    })?;
    // Behind them by the same way, and certain to arrive.
    link.set_from(End::A, |conditions| *conditions = Conditions::new())?;
    sender.send_to(&datagram(END), address())?;
    let mut numbers = Vec::new();
    let mut received = [0; 101];
    loop {
        let len = receiver.recv(&mut received).context("the last datagram")?;
        ensure!(len == 100, "a datagram of {len} bytes");
        let number = u32::from_be_bytes(received[..4].try_into().expect("four bytes"));
        if number == END {
            return Ok((numbers, stats));
        }
        numbers.push(number);
    }
}

fn datagram(number: u32) -> [u8; 100] {
    let mut datagram = [0; 100];
    datagram[..4].copy_from_slice(&number.to_be_bytes());
    datagram
}

/// As [`batches`], one by one.
fn datagrams(
    hosts: (&Host, &Host, &Link),
    count: u32,
    spacing: Duration,
) -> Result<(Vec<u32>, WireStats)> {
    batches(hosts, count, 1, spacing)
}

/// TCP carries so many megabytes, and not faster than a link of so many Mbit/s lets it. However slow the machine
/// is, that holds.
fn carries(a: &Host, b: &Host, megabytes: u64, megabits: u64) -> Result<()> {
    let (start, bytes) = (Instant::now(), megabytes << 20);
    let report = Throughput::new(address()).bytes(bytes).run(a, b)?;
    let took = start.elapsed();
    assert_eq!(report.bytes, bytes);
    // A token bucket lets what it saved up pass at once: 2 ms of its rate, or 16 KiB.
    let at_once = (megabits * 1_000_000 / 8 / 500).max(16 << 10);
    let least = Duration::from_secs_f64((bytes - at_once) as f64 * 8.0 / (megabits as f64 * 1e6));
    assert!(
        took >= least,
        "{took:?} for {megabytes} MB at {megabits} Mbit/s"
    );
    Ok(())
}

#[test]
fn shaped_links_carry_no_more_than_their_rate() {
    isolated(|| {
        let mut lab = Lab::new()?;
        let (a, b) = (lab.host("a")?, lab.host("b")?);
        let link = lab.link(spec(&a, &b).shaped(100_000_000))?;
        carries(&a, &b, 8, 100)?;
        link.shape(1_000_000_000)?;
        carries(&a, &b, 32, 1000)?;
        for host in [&a, &b] {
            let bucket = host.run("tc qdisc show dev eth0")?;
            assert!(bucket.contains("rate 1Gbit"), "{bucket}");
        }
        Ok(())
    });
}

#[test]
fn emulated_links_carry_no_more_than_their_rate() {
    isolated(|| {
        let (_lab, a, b, link) = emulated(Conditions::new().rate(20_000_000))?;
        carries(&a, &b, 2, 20)?;
        link.set(|conditions| conditions.rate = Some(300_000_000))?;
        carries(&a, &b, 16, 300)?;
        link.set(|conditions| conditions.rate = Some(100_000_000))?;
        link.set(|conditions| conditions.delay = 10 * MS)?;
        carries(&a, &b, 8, 100)?;
        for end in End::BOTH {
            let stats = link.stats(end)?;
            assert_eq!((stats.oversized, stats.overruns), (0, 0), "{stats:?}");
        }
        Ok(())
    });
}

#[test]
fn the_delay_is_each_ways() {
    isolated(|| {
        let (_lab, a, b, _link) = emulated(Conditions::new().delay(10 * MS))?;
        let report = Latency::measured([&a, &b], address(), Transport::Tcp, 100 * MS)?;
        println!("{}", serde_json::to_string(&report)?);
        assert!(report.min_us >= 10_000.0, "{report:?}");
        Ok(())
    });
}

#[test]
fn each_datagram_is_lost_for_itself() {
    isolated(|| {
        let (_lab, a, b, link) = emulated(Conditions::new().loss(0.1))?;
        let (arrived, stats) = datagrams((&a, &b, &link), 10_000, Duration::ZERO)?;
        let lost = 10_000 - arrived.len();
        // Five standard deviations.
        assert!((850..1150).contains(&lost), "{lost} of 10,000");
        assert_eq!(stats.lost, lost as u64, "{stats:?}");
        assert!(arrived.is_sorted());
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
        let (_lab, a, b, link) = emulated(Conditions::new().loss(0.2))?;
        let (arrived, stats) = batches((&a, &b, &link), 300, 10, Duration::ZERO)?;
        let count = arrived.len();
        assert!((200..280).contains(&count), "{count} of 300");
        assert_eq!(stats.oversized, 0);
        let of_batch = |batch| arrived.iter().filter(|&&n| n / 10 == batch).count();
        let partly = (0..30).filter(|&batch| (1..10).contains(&of_batch(batch)));
        assert!(partly.count() > 15, "{arrived:?}");
        Ok(())
    });
}

#[test]
fn losses_hit_single_segments_of_a_superpacket() {
    isolated(|| {
        let conditions = Conditions::new().rate(100_000_000).loss(0.01);
        let (_lab, a, b, link) = emulated(conditions)?;
        let bytes = 12 << 20;
        let report = Throughput::new(address()).bytes(bytes).run(&a, &b)?;
        let stats = link.stats(End::A)?;
        println!("{} {stats:?}", serde_json::to_string(&report)?);
        assert_eq!(stats.oversized, 0);
        assert!(
            stats.entered > report.bytes / 1448,
            "superpackets passed: {stats:?}"
        );
        let share = stats.lost as f64 / stats.entered as f64;
        assert!((0.005..0.015).contains(&share), "{share}");
        // But for what closes the connection, and for what a second copy of came.
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
        let (arrived, stats) = datagrams((&a, &b, &link), 4000, MS / 4)?;
        let distinct: BTreeSet<&u32> = arrived.iter().collect();
        assert_eq!(distinct.len(), 4000);
        let twice = arrived.len() - distinct.len();
        assert!((130..270).contains(&twice), "{twice} of 4,000 came twice");
        assert_eq!(stats.duplicated, twice as u64);
        assert!((130..270).contains(&stats.reordered), "{stats:?}");
        // Of those held back, all that others came behind in time: one and its copy fall back once.
        let overtaken = arrived.windows(2).filter(|pair| pair[1] < pair[0]).count();
        assert!(overtaken > 0, "none of {} was overtaken", stats.reordered);
        assert!(
            overtaken as u64 <= stats.reordered,
            "{overtaken}: {stats:?}"
        );

        link.set(|conditions| *conditions = Conditions::new().delay(5 * MS).jitter(2 * MS))?;
        let (arrived, _) = datagrams((&a, &b, &link), 2000, MS / 4)?;
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
        let transfer = Throughput::new(address()).endless().start(&a, &b)?;
        link.set_from(End::A, |conditions| conditions.corrupt = 0.005)?;
        wait_until(HANG, "flipped bits", || {
            link.stats(End::A).is_ok_and(|stats| stats.corrupted > 20)
        })?;
        transfer.stop();
        // The transfer compares every byte.
        let report = transfer.finish()?;
        let stats = link.stats(End::A)?;
        assert!(report.retransmissions >= stats.corrupted / 2, "{report:?}");
        Ok(())
    });
}

#[test]
fn an_outage_stops_everything_and_ends() {
    isolated(|| {
        let (_lab, a, b, link) = emulated(Conditions::new().rate(100_000_000).delay(MS))?;
        let transfer = Throughput::new(address()).endless().start(&a, &b)?;
        wait_until(HANG, "a start", || transfer.received() > 1_000_000)?;
        let outage = {
            let start = link.elapsed()? + 50 * MS;
            start..start + 400 * MS
        };
        link.set(|conditions| conditions.outages.push(outage.clone()))?;
        let passed = || link.elapsed().is_ok_and(|now| now >= outage.end);
        wait_until(HANG, "the outage's end", passed)?;
        let received = transfer.received();
        wait_until(HANG, "more after the outage", || {
            transfer.received() > received + 1_000_000
        })?;
        transfer.stop();
        transfer.finish()?;

        for out in [true, false] {
            link.set(|conditions| conditions.outage = out)?;
            let before = link.stats(End::A)?.outage_dropped;
            let (arrived, stats) = datagrams((&a, &b, &link), 10, Duration::ZERO)?;
            assert_eq!(arrived.len(), if out { 0 } else { 10 });
            // What the hosts say of themselves may be among it.
            let dropped = stats.outage_dropped - before;
            assert!(if out { dropped >= 10 } else { dropped == 0 }, "{dropped}");
        }
        Ok(())
    });
}

#[test]
fn links_and_recordings_end_while_processes_run() {
    isolated(|| {
        let (_lab, a, b, link) = emulated(Conditions::new())?;
        let capture = Capture::start(&a, "eth0")?;
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
        // As long as it takes the sender to send a few, nothing leaves a queue of 88 datagrams of 142 bytes as
        // frames.
        let conditions = Conditions::new().rate(1000).queue(88 * 142);
        let (_lab, a, _b, link) = emulated(conditions)?;
        let sender = a.in_ns(|| UdpSocket::bind("10.0.1.1:0"))?;
        for number in 0..150 {
            sender.send_to(&datagram(number), address())?;
        }
        let stats = wait_for(HANG, "all of them to enter", || {
            let stats = link.stats(End::A).ok()?;
            (stats.entered == 150).then_some(stats)
        })?;
        // One more for each second that this took.
        let most = 88 + link.elapsed()?.as_secs();
        let kept = 150 - stats.queue_dropped;
        assert!((88..=most).contains(&kept), "{kept} kept: {stats:?}");
        Ok(())
    });
}

#[test]
fn the_same_seed_loses_the_same_datagrams() {
    isolated(|| {
        let run = || -> Result<Vec<u32>> {
            let (_lab, a, b, link) = emulated(Conditions::new().loss(0.2))?;
            let (arrived, stats) = datagrams((&a, &b, &link), 1000, Duration::ZERO)?;
            assert_eq!(stats.entered, 1000);
            Ok(arrived)
        };
        let first = run()?;
        assert!((700..900).contains(&first.len()));
        assert_eq!(first, run()?);
        Ok(())
    });
}
