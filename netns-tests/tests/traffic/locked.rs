//! Plain packets that others send into a connection on a bump: nothing happens.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context as _, Result, ensure};
use dibs_lab::Capture;
use netns_tests::attacker::{Attacker, Segment, numbers};
use netns_tests::daemon::{Node, SOON, wait};
use netns_tests::topology::{server, server_v6};
use netns_tests::traffic::connect;
use netns_tests::{Net, Setup, isolated};
use nix::sys::signal::Signal;

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// An idle connection from `a` to `b`, and a third host that knows its numbers.
struct Idle {
    near: TcpStream,
    far: TcpStream,
    attacker: Attacker,
    /// What `b` would send next, without payload.
    next: Segment<'static>,
}

impl Idle {
    fn new(net: &mut Net, server: SocketAddr) -> Result<Self> {
        let attacker = Attacker::on(&net.intruder()?)?;
        let ears = Capture::start(&net.b.host, "eth0")?;
        let (mut near, mut far) = connect(&net.a.host, &net.b.host, server)?;
        far.write_all(b"the last words in plain")?;
        let mut heard = [0; 23];
        near.read_exact(&mut heard)?;
        let (seq, ack) = numbers(&ears.finish()?, &heard).context("the words were heard")?;
        let next = Segment {
            from: far.local_addr()?,
            to: near.local_addr()?,
            seq,
            ack,
            flags: ACK,
            payload: b"",
        };
        Ok(Self {
            near,
            far,
            attacker,
            next,
        })
    }

    fn send(&self, flags: u8, payload: &[u8]) -> Result<()> {
        let segment = Segment {
            flags,
            payload,
            ..self.next
        };
        self.attacker.send_segment(&segment).context("forged")
    }

    /// What `a` reads next, within a while.
    fn reads(&mut self) -> std::io::Result<Vec<u8>> {
        let mut buffer = [0; 64];
        let read = self.near.read(&mut buffer)?;
        Ok(buffer[..read].to_vec())
    }

    /// Whether both ends still hear each other, and nobody else.
    fn goes_on(&mut self) -> Result<()> {
        for round in 0..3 {
            self.far.write_all(b"from b")?;
            let heard = self.reads().context("a hears nothing more")?;
            ensure!(heard == b"from b", "round {round}: a heard {heard:?}");
            self.near.write_all(b"from a")?;
            let mut heard = [0; 6];
            self.far.read_exact(&mut heard)?;
            ensure!(heard == *b"from a", "round {round}: b heard {heard:?}");
        }
        Ok(())
    }
}

fn dropped(net: &Net) -> Result<u64> {
    Ok(net.a.counter("plain_in_locked")? + net.a.counter("plain_in_stray")?)
}

/// Waits for the rules of the connection's own: until the chain that counts is written anew.
fn until_ruled(net: &Net) -> Result<()> {
    wait("a rule of the connection's own", || {
        ["iptables", "ip6tables"].iter().any(|iptables| {
            let rules = net
                .a
                .host
                .run(&format!("{iptables} -t mangle -S DIBS-PLAIN"));
            rules.is_ok_and(|rules| rules.contains("dibs-rule-0"))
        })
    })
}

fn until_dropped(net: &Net, count: u64) -> Result<()> {
    let mut seen = 0;
    let done = wait("forged packets to be dropped", || {
        seen = dropped(net).unwrap_or(0);
        seen >= count
    });
    done.with_context(|| format!("{seen} of {count}"))
}

fn forged(server: SocketAddr, router: SocketAddr) -> Result<()> {
    Setup::new().run(|net| {
        let mut idle = Idle::new(net, server)?;
        net.a.enable(7000)?;
        net.wait_locked(7000)?;
        until_ruled(net)?;
        let before = dropped(net)?;
        idle.send(ACK, b"forged")?;
        idle.send(RST, b"")?;
        idle.send(RST | ACK, b"")?;
        idle.send(SYN, b"")?;
        // None that conntrack knows for the connection's, but Linux would take the RST.
        idle.send(RST | FIN | ACK, b"")?;
        until_dropped(net, before + 5)?;
        // Told that what it sends is too long for the way.
        let ours = Segment {
            from: idle.next.to,
            to: idle.next.from,
            seq: idle.next.ack,
            ack: idle.next.seq,
            ..idle.next
        };
        idle.attacker.send_too_long(&ours, router)?;
        until_dropped(net, before + 6)?;
        idle.goes_on()?;
        net.wait_locked(7000)
    })
}

#[test]
fn forged_data_and_resets_do_nothing_to_a_locked_connection() {
    isolated(|| forged(server(7000), "10.0.3.3:0".parse()?));
}

#[test]
fn forged_data_and_resets_do_nothing_to_a_locked_connection_over_ipv6() {
    isolated(|| forged(server_v6(7000), "[fd00:3::3]:0".parse()?));
}

#[test]
fn nor_do_they_by_way_of_its_entry_in_conntrack() {
    isolated(|| {
        Setup::new().run(|net| {
            let mut idle = Idle::new(net, server(7000))?;
            net.a.enable(7000)?;
            net.wait_locked(7000)?;
            until_ruled(net)?;
            // Conntrack sees packets before they are dropped: it takes the connection for closed, and
            // the next SYN for another one's, which is not locked.
            for round in 1..=3 {
                let before = dropped(net)?;
                idle.send(RST, b"")?;
                idle.send(SYN, b"")?;
                idle.send(RST, b"")?;
                idle.send(ACK, b"forged")?;
                // Some are dropped elsewhere, by their flags.
                until_dropped(net, before + 2).with_context(|| format!("round {round}"))?;
            }
            idle.goes_on()?;
            net.wait_locked(7000)
        })
    });
}

fn taken(server: SocketAddr) -> Result<()> {
    // Who lets packets out in plain takes them in plain.
    Setup::new().key("fail = \"open\"").run(|net| {
        let mut idle = Idle::new(net, server)?;
        net.a.enable(7000)?;
        net.wait_bump(7000, "scramble")?;
        idle.send(ACK, b"forged")?;
        ensure!(idle.reads()? == b"forged");
        idle.next.seq = idle.next.seq.wrapping_add(6);
        idle.send(RST, b"")?;
        let error = idle.reads().err().map(|error| error.kind());
        ensure!(error == Some(ErrorKind::ConnectionReset), "{error:?}");
        Ok(())
    })
}

#[test]
fn forged_packets_do_what_they_say_to_one_that_is_not_locked() {
    isolated(|| taken(server(7000)));
}

#[test]
fn forged_packets_do_what_they_say_to_one_that_is_not_locked_over_ipv6() {
    isolated(|| taken(server_v6(7000)));
}

/// Packets of a knock, which come in plain before a connection is let go, and carry no data: 16 pairs at most.
const KNOCK: u64 = 32;

#[test]
fn a_locked_connection_leaves_without_a_loss_by_either_end() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            for on_a in [true, false, true] {
                net.a.enable(7000)?;
                net.wait_locked(7000)?;
                talk.advance(1 << 20)?;
                let before = [dropped(net)?, net.b.counter("plain_in_locked")?];
                if on_a {
                    net.a.disable(7000)?;
                } else {
                    net.b.switch("disable", "--sport", 7000)?;
                }
                net.wait_bump(7000, "plain")?;
                talk.advance(1 << 20)?;
                let after = [dropped(net)?, net.b.counter("plain_in_locked")?];
                let few = { before.iter().zip(&after) }.all(|(b, a)| a - b <= KNOCK);
                ensure!(few, "dropped {before:?}, then {after:?}");
            }
            // Nor did the way in cost what was still to come in plain.
            for host in [&net.a, &net.b] {
                ensure!(host.counter("plain_in_stray")? == 0, "strays at a switch");
            }
            talk.finish()
        })
    });
}

#[test]
fn connections_of_rules_are_locked_and_let_go_with_their_rule() {
    isolated(|| {
        Setup::new().run(|net| {
            let rule = ["rule", "add", "--dport", "7000", "--bump", "scramble"];
            let made = net.a.ctl(&rule)?;
            let talk = net.talk(7000)?;
            net.wait_locked(7000)?;
            talk.advance(1 << 20)?;
            net.a.ctl(&["rule", "del", &made["id"].to_string()])?;
            net.wait_bump(7000, "plain")?;
            talk.advance(1 << 20)?;
            talk.finish()
        })
    });
}

#[test]
fn a_lock_outlives_the_daemon_and_the_loss_of_its_entry() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            net.a.enable(7000)?;
            net.wait_locked(7000)?;
            for node in [&net.a, &net.b] {
                node.host.run("conntrack -F")?;
                talk.advance(1 << 20)?;
                node.wait_locked(7000)?;
            }
            net.a.stop(Signal::SIGKILL)?;
            net.a.wait_locked(7000)?;
            net.a.host.run("conntrack -F")?;
            net.a.start()?;
            net.wait_established()?;
            talk.advance(1 << 20)?;
            net.wait_locked(7000)?;
            // A bump that goes in anew is locked anew.
            net.a.disable(7000)?;
            net.wait_bump(7000, "plain")?;
            talk.advance(1 << 20)?;
            net.b.switch("enable", "--sport", 7000)?;
            net.wait_locked(7000)?;
            talk.advance(1 << 20)?;
            talk.finish()
        })
    });
}

/// Waits until conntrack still has a connection to `port`, and nothing locked.
fn until_let_go(node: &Node, port: u16) -> Result<()> {
    let list = format!("conntrack -L -p tcp --dport {port}");
    wait("LOCKED to go, and the entry to stay", || {
        let listed = node.host.run(&list).unwrap_or_default();
        let marks: Vec<u32> = { listed.split_ascii_whitespace() }
            .filter_map(|word| word.strip_prefix("mark=")?.parse().ok())
            .collect();
        !marks.is_empty() && marks.iter().all(|mark| mark & 0x2000_0000 == 0)
    })
}

#[test]
fn a_lock_ends_with_its_connection() {
    isolated(|| {
        let rule = "dport = 7000\nbump = \"scramble\"";
        Setup::new().rule(rule).run(|net| {
            let (near, far) = connect(&net.a.host, &net.b.host, server(7000))?;
            net.wait_locked(7000)?;
            drop((near, far));
            for node in [&net.a, &net.b] {
                until_let_go(node, 7000)?;
            }
            // One that an earlier run locked, of which this one has no record.
            net.a.stop(Signal::SIGKILL)?;
            net.a.host.run(
                "conntrack -I -p tcp -s 10.0.1.1 -d 10.0.1.2 --sport 4000 --dport 7001 \
                 --state ESTABLISHED -u SEEN_REPLY,ASSURED -t 1000 -m 0x21000000",
            )?;
            net.a.start()?;
            until_let_go(&net.a, 7001)
        })
    });
}

#[test]
fn what_another_program_chooses_reaches_the_peer() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            // Both ways of choosing: to stay, and as long as nothing else decides.
            for (node, port) in [(&net.a, "--dport"), (&net.b, "--sport")] {
                for (bump, value) in [
                    ("scramble", "0x11000000/0x1f000000"),
                    ("plain", "0x10000000/0x1f000000"),
                    ("scramble", "0x11000000/0x1f000000"),
                    ("plain", "0x10000000/0x1f000000"),
                ] {
                    let rule = format!("OUTPUT -p tcp {port} 7000 -j CONNMARK --set-xmark {value}");
                    node.host.run(&format!("iptables -t mangle -A {rule}"))?;
                    net.wait_bump(7000, bump)?;
                    node.host.run(&format!("iptables -t mangle -D {rule}"))?;
                    talk.advance(256 << 10)?;
                    net.wait_bump(7000, bump)?;
                }
            }
            talk.finish()
        })
    });
}

#[test]
fn a_mark_without_a_choice_reaches_the_peer_too() {
    isolated(|| {
        Setup::new().run(|net| {
            let (mut near, mut far) = connect(&net.a.host, &net.b.host, server(7000))?;
            // Conntrack follows it from its next packet on.
            let tracked = "OUTPUT -p tcp --dport 7000 -j CONNMARK --set-xmark 0x1000000/0xf000000";
            net.a
                .host
                .run(&format!("iptables -t mangle -A {tracked}"))?;
            near.write_all(b"on")?;
            let mut heard = [0; 2];
            far.read_exact(&mut heard)?;
            net.a
                .host
                .run(&format!("iptables -t mangle -D {tracked}"))?;
            net.wait_bump(7000, "scramble")?;
            net.wait_locked(7000)?;
            near.set_read_timeout(Some(SOON))?;
            far.write_all(b"on")?;
            near.read_exact(&mut heard)?;
            Ok(())
        })
    });
}
