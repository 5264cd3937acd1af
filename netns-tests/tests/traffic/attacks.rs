//! Who stands in a link, records, delays, copies and floods; and a peer that is an attacker.

use std::io::Read as _;
use std::net::{SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_lab::Capture;
use dibs_netns::{Host, wait_until};
use netns_tests::attacker::{Attacker, datagrams, signed_segment};
use netns_tests::daemon::{Node, SOON, wait};
use netns_tests::hostile::{HostilePeer, strangers_calls};
use netns_tests::{Net, Setup, isolated};
use nix::sys::signal::Signal;
use socket2::{Domain, Protocol, Socket, Type};

/// Between two of a few datagrams that have to last longer than a challenge is repeated, several times as long.
const PACE: Duration = Duration::from_millis(300);
/// Messages of strangers that a daemon reads: so many at once, and so many a second.
const READ_AT_ONCE: u64 = 32;
const READ_A_SECOND: u64 = 50;
/// Messages of a flood, a second: two hundred times what the daemon reads of them. With as many as can be
/// sent it is the machine that decides whether the socket's buffer overflows, and not the daemon.
const FLOOD_RATE: f64 = 10_000.0;

fn address(text: &str) -> Result<SocketAddrV4> {
    text.parse().with_context(|| text.to_owned())
}

fn attacker(net: &Net) -> Result<&Host> {
    net.attacker.as_ref().context("a host in the link")
}

fn endpoints(node: &Node) -> Result<Vec<String>> {
    let paths = node.ctl(&["path", "list"])?;
    let paths = paths.as_array().context("path list is an array")?;
    let remotes = paths.iter().map(|path| path["remote"].to_string());
    Ok(remotes.collect())
}

/// The sum of these counters.
fn count(node: &Node, names: &[&str]) -> Result<u64> {
    let counts = names.iter().map(|name| node.counter(name));
    Ok(counts.collect::<Result<Vec<_>>>()?.iter().sum())
}

/// Swallows what `a` sends to `b` on the untrusted link, or no longer.
fn swallow(net: &Net, command: &str) -> Result<String> {
    let rule = "PREROUTING -i wlan0 -s 10.0.2.1 -j DROP";
    net.b.host.run(&format!("iptables -t raw {command} {rule}"))
}

#[test]
fn authentic_datagrams_from_elsewhere() {
    isolated(|| {
        Setup::new().attacked("wlan0").run(|net| {
            let talk = net.bumped()?;
            let before = endpoints(&net.b)?;
            let (elsewhere, b) = (address("10.0.2.77:4444")?, address("10.0.2.2:5300")?);
            // Authentic, and newer than all that `b` has.
            swallow(net, "-I")?;
            let ears = Capture::start(attacker(net)?, "near0")?;
            wait_until(SOON, "datagrams", || ears.seen() > 100)?;
            let heard = datagrams(&ears.finish()?, b);
            ensure!(heard.len() >= 20, "{} datagrams heard", heard.len());
            let back = Capture::start(attacker(net)?, "mitm0")?;
            let sender = Attacker::on(attacker(net)?)?;
            let challenged = net.b.counter("endpoint_challenged")?;
            let (first, later) = heard.split_at(5);
            for datagram in first {
                sender.send(elsewhere, b, datagram)?;
            }
            let challenges = |n: u64| {
                let counted = net.b.counter("endpoint_challenged");
                counted.is_ok_and(|now| now == challenged + n)
            };
            wait("a challenge", || challenges(1))?;
            // As long as it is repeated, what else comes from there changes nothing. After that it is
            // another challenge.
            let (mut later, mut last) = (later.iter(), Instant::now());
            wait("the end of the first challenge", || {
                if last.elapsed() > PACE {
                    last = Instant::now();
                    let sent = later.next().map(|next| sender.send(elsewhere, b, next));
                    assert!(matches!(sent, Some(Ok(()))), "{sent:?}");
                }
                challenges(2)
            })?;
            let answers = datagrams(&back.finish()?, elsewhere);
            let bytes = |datagrams: &[Vec<u8>]| datagrams.iter().map(Vec::len).sum::<usize>();
            let (sent, got) = (bytes(&heard), bytes(&answers));
            ensure!(got > 0 && got <= 3 * sent, "{got} bytes for {sent}");
            ensure!(answers.len() <= 2 * 3, "{} challenges", answers.len());
            ensure!(endpoints(&net.b)? == before, "an endpoint moved");
            ensure!(net.b.counter("endpoint_moved")? == 0, "an endpoint moved");
            swallow(net, "-D")?;
            net.wait_established()?;
            talk.advance(1 << 20)?;
            talk.finish()
        })
    });
}

/// Keeps what comes from this address on the trusted link from the node's daemon, or no longer.
fn unheard(node: &Node, from: &str, command: &str) -> Result<String> {
    let rule = format!("PREROUTING -i eth0 -s {from} -p udp -j DROP");
    node.host.run(&format!("iptables -t raw {command} {rule}"))
}

#[test]
fn a_recorded_first_message() {
    isolated(|| {
        let setup = Setup::new().attacked("eth0").without_daemons();
        setup.run(|net| {
            // The calls of `b` would make those of `a` needless, which would then be news to it later.
            net.b.start()?;
            unheard(&net.a, "10.0.1.2", "-I")?;
            let ears = Capture::start(attacker(net)?, "near0")?;
            net.a.start()?;
            let taken = ["sessions_established", "handshake_crossed"];
            wait("a call to be taken", || {
                count(&net.b, &taken).is_ok_and(|n| n > 0)
            })?;
            unheard(&net.a, "10.0.1.2", "-D")?;
            net.wait_established()?;
            let (elsewhere, b) = (address("10.0.1.77:4444")?, address("10.0.1.2:5300")?);
            let heard = datagrams(&ears.finish()?, b);
            let calls: Vec<_> = heard.iter().filter(|d| d[0] == 1).collect();
            ensure!(!calls.is_empty(), "no call was heard");
            let talk = net.bumped()?;
            let sender = Attacker::on(attacker(net)?)?;
            let back = Capture::start(attacker(net)?, "mitm0")?;
            // Beside the talk some get lost.
            wait("the recordings to be counted", || {
                let sent = [elsewhere, address("10.0.1.1:5300").expect("an address")]
                    .iter()
                    .all(|from| sender.send(*from, b, calls[0]).is_ok());
                sent && net.b.counter("handshake_replayed").is_ok_and(|n| n >= 20)
            })?;
            let answers = datagrams(&back.finish()?, elsewhere);
            // Those that come too often are asked for a cookie (type 3).
            let answered = answers.iter().any(|answer| answer[0] == 2);
            ensure!(!answered, "a recording was answered");
            talk.advance(1 << 20)?;

            // Nobody remembers it now. `a` is kept away for a moment, so that the recording is first.
            unheard(&net.b, "10.0.1.1", "-I")?;
            net.b.stop(Signal::SIGTERM)?;
            net.b.start()?;
            let back = Capture::start(attacker(net)?, "mitm0")?;
            for call in &calls {
                sender.send(elsewhere, b, call)?;
            }
            // Answered, or crossed by a call of its own.
            wait("the recording to be taken", || {
                count(&net.b, &taken).is_ok_and(|n| n as usize >= calls.len())
            })?;
            let peers = net.b.ctl(&["peer", "list"])?;
            ensure!(peers[0]["state"] != "established", "{peers:#}");
            let answers = datagrams(&back.finish()?, elsewhere);
            ensure!(
                answers.iter().all(|answer| answer.len() < calls[0].len()),
                "an answer longer than its question"
            );
            unheard(&net.b, "10.0.1.1", "-D")?;
            net.wait_established()?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(1 << 20)?;
            talk.finish()
        })
    });
}

/// Sends first messages from addresses that are not its own.
struct Flood {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<Result<()>>,
}

impl Flood {
    fn start(from: &Host, calls: Vec<Vec<u8>>, net: u8) -> Result<Self> {
        let sender = Attacker::on(from)?;
        let to = address(&format!("10.0.{net}.2:5300"))?;
        let (stop, sent) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&sent));
        let thread = from.thread("flood", move || {
            let began = Instant::now();
            for number in 0u32.. {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let host = 100 + (number % 100) as u8;
                let port = 1024 + (number / 100 % 60_000) as u16;
                let from = SocketAddrV4::new([10, 0, net, host].into(), port);
                let call = &calls[number as usize % calls.len()];
                let due = Duration::from_secs_f64(f64::from(number) / FLOOD_RATE);
                std::thread::sleep(due.saturating_sub(began.elapsed()));
                // A full queue is part of a flood.
                if sender.send(from, to, call).is_ok() {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
            Ok(())
        })?;
        Ok(Self { stop, sent, thread })
    }

    fn finish(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.join();
        ended.map_err(|_| anyhow::anyhow!("the flood panicked"))??;
        Ok(self.sent.load(Ordering::Relaxed))
    }
}

/// A connection and a new session stand a flood on a link; returns what became of the messages.
fn under_flood(setup: Setup, interface: &'static str, number: u8, counters: &[&str]) -> Result<()> {
    setup.attacked(interface).run(|net| {
        let talk = net.bumped()?;
        let calls = strangers_calls(&net.b, 64)?;
        let before = count(&net.b, counters)?;
        let flood = Flood::start(attacker(net)?, calls, number)?;
        wait("the flood", || {
            count(&net.b, counters).is_ok_and(|n| n > before + 1000)
        })?;
        talk.advance(256 << 10)?;

        // Keys are agreed in spite of it.
        net.b.stop(Signal::SIGTERM)?;
        let restarted = Instant::now();
        net.b.start()?;
        net.wait_established()?;
        talk.advance(1 << 20)?;
        let sent = flood.finish()?;
        let read = net.b.counter("handshake_unknown_peer")?;
        println!("{sent} messages; {read} read since the restart");
        let most = READ_AT_ONCE + READ_A_SECOND * (restarted.elapsed().as_secs() + 1);
        ensure!(read <= most, "{read} messages of strangers were read");
        net.wait_bump(7000, "scramble")?;
        talk.finish()
    })
}

#[test]
fn a_flood_on_the_untrusted_link() {
    isolated(|| {
        let counters = ["handshake_cookie_demanded", "handshake_overload"];
        under_flood(Setup::new(), "wlan0", 2, &counters)
    });
}

#[test]
fn a_flood_on_the_untrusted_link_where_no_keys_are_agreed() {
    isolated(|| {
        let setup = Setup::new().key("handshake = \"trusted\"");
        under_flood(setup, "wlan0", 2, &["handshake_untrusted_path"])
    });
}

#[test]
fn a_flood_on_the_trusted_link() {
    isolated(|| {
        under_flood(
            Setup::new(),
            "eth0",
            1,
            &["handshake_cookie_demanded", "handshake_overload"],
        )
    });
}

#[test]
fn a_peer_that_sends_what_it_should_not() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            net.b.start()?;
            // The host forwards, and has the looser settings.
            for key in [
                "net.ipv4.ip_forward",
                "net.ipv4.conf.all.route_localnet",
                "net.ipv4.conf.all.accept_redirects",
            ] {
                net.b.host.sysctl(key, "1")?;
            }
            net.b
                .ctl(&["rule", "add", "--dport", "1", "--bump", "scramble"])?;
            let mut peer = HostilePeer::connect(net)?;
            // Hears each TCP segment for the host, whatever becomes of it.
            let hears = || Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::TCP));
            let mut all = net.b.host.in_ns(hears)?;
            all.set_nonblocking(true)?;
            let ears = [
                Capture::start(&net.b.host, "eth0")?,
                Capture::start(&net.b.host, "wlan0")?,
            ];
            let evil = b"this should not have come out";
            let cases = [
                // Not the peer's, and not ours.
                ("10.0.1.9:1", "10.0.1.2:9000"),
                ("10.0.1.2:1", "10.0.1.2:9000"),
                ("127.0.0.1:1", "10.0.1.2:9000"),
                ("10.0.1.1:1", "127.0.0.1:9000"),
                ("10.0.1.1:1", "10.0.2.1:9000"),
                ("10.0.1.1:1", "10.0.1.1:9000"),
                ("10.0.1.1:1", "10.0.1.255:9000"),
                ("10.0.1.1:1", "224.0.0.1:9000"),
                ("10.0.1.1:1", "255.255.255.255:9000"),
            ];
            let refused = net.b.counter("inner_address_refused")?;
            for (from, to) in cases {
                let (from, to): (SocketAddr, SocketAddr) = (from.parse()?, to.parse()?);
                peer.send(&signed_segment(from, to, evil))?;
            }
            let mut counted = 0;
            wait("all of them to be counted", || {
                // Infallible but for its socket, which is asked again.
                let _ = peer.work();
                let now = net.b.counter("inner_address_refused");
                counted = now.unwrap_or(refused) - refused;
                counted >= cases.len() as u64
            })
            .with_context(|| format!("{counted} of {}", cases.len()))?;
            ensure!(counted == cases.len() as u64, "{counted} were counted");

            // What it may send comes out, and behind all of the others.
            let from = "10.0.1.1:1".parse()?;
            let good = signed_segment(from, "10.0.1.2:9000".parse()?, b"good");
            peer.send(&good)?;
            let mut heard = Vec::new();
            wait("what it may send", || {
                let _ = peer.work();
                let mut packet = [0; 1500];
                while let Ok(len) = all.read(&mut packet) {
                    heard.push(packet[..len].to_vec());
                }
                heard.contains(&good)
            })?;
            let is_evil = |packet: &&Vec<u8>| packet.ends_with(evil);
            let evil_one = heard.iter().find(is_evil);
            ensure!(evil_one.is_none(), "it came out: {evil_one:02x?}");
            for ears in ears {
                ensure!(!ears.finish()?.contains(evil), "forwarded");
            }
            Ok(())
        })
    });
}
