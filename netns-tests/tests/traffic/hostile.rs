//! Datagrams that no daemon sent: dropped, counted, harmless.

use std::net::SocketAddrV4;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::Capture;
use dibs_netns::wait_until;
use netns_tests::attacker::{Attacker, datagrams};
use netns_tests::daemon::{SOON, wait};
use netns_tests::traffic::Talk;
use netns_tests::{Net, Setup, isolated};

/// How many an attack sends.
const MANY: usize = 200;
/// Datagrams that find room in a socket together.
const AT_ONCE: usize = 32;

/// Where the daemons are on the untrusted link.
fn client() -> SocketAddrV4 {
    "10.0.2.1:5300".parse().expect("an address")
}

fn server() -> SocketAddrV4 {
    "10.0.2.2:5300".parse().expect("an address")
}

/// What became of the datagrams that the attacker heard.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    /// They arrived.
    Delivered,
    /// They did not.
    Swallowed,
}

/// What `a` sends to `b` on the untrusted link.
fn listen(net: &Net, talk: &Talk, fate: Fate) -> Result<Vec<Vec<u8>>> {
    // Behind the ears of whoever listens on the interface.
    let swallow = |command: &str| {
        let rule = format!("iptables -t raw {command} PREROUTING -i wlan0 -j DROP");
        net.b.host.run(&rule)
    };
    if fate == Fate::Swallowed {
        swallow("-I")?;
    }
    let ears = Capture::start(&net.b.host, "wlan0")?;
    let heard = if fate == Fate::Swallowed {
        wait_until(SOON, "datagrams", || ears.seen() > MANY)?;
        let heard = ears.finish()?;
        swallow("-D")?;
        heard
    } else {
        talk.advance(1 << 20)?;
        ears.finish()?
    };
    let heard = datagrams(&heard, server());
    if fate == Fate::Delivered {
        deliver(net, talk, &heard)?;
    }
    Ok(heard)
}

/// Sends each of them once more from where it came: what passed the interface of a busy host may have found no room in the
/// daemon's socket, and a copy of it would be taken, rightly.
fn deliver(net: &Net, talk: &Talk, heard: &[Vec<u8>]) -> Result<()> {
    let attacker = Attacker::on(&net.a.host)?;
    for some in heard.chunks(AT_ONCE) {
        for datagram in some {
            attacker.send(client(), server(), datagram)?;
        }
        // They are read before what comes behind them.
        talk.advance(1 << 16)?;
    }
    let mut counted = 0;
    wait("all copies to be read", || {
        let before = std::mem::replace(
            &mut counted,
            net.b.counter("datagram_replayed").unwrap_or_default(),
        );
        counted > 0 && counted == before
    })
}

/// Sends datagrams to `b` under a connection on the bump, made from what was heard on the untrusted
/// link: each is counted by one of these names, and nothing else changes.
fn attack(
    from: SocketAddrV4,
    counters: &[&str],
    fate: Fate,
    forge: impl Fn(&[Vec<u8>], usize) -> Vec<u8>,
) -> Result<()> {
    Setup::new().run(|net| {
        let talk = net.talk(7000)?;
        net.a.enable(7000)?;
        net.wait_bump(7000, "scramble")?;
        let heard = listen(net, &talk, fate)?;
        ensure!(heard.len() > 20, "{} datagrams heard", heard.len());
        let count = |net: &Net| -> Result<u64> {
            let counts = counters.iter().map(|name| net.b.counter(name));
            Ok(counts.collect::<Result<Vec<_>>>()?.iter().sum())
        };
        let endpoints = |net: &Net| -> Result<Vec<String>> {
            let paths = net.b.ctl(&["path", "list"])?;
            let paths = paths.as_array().context("path list is an array")?;
            Ok(paths
                .iter()
                .map(|path| path["remote"].to_string())
                .collect())
        };
        let before = (count(net)?, endpoints(net)?);

        let attacker = Attacker::on(&net.a.host)?;
        for number in 0..MANY {
            attacker.send(from, server(), &forge(&heard, number))?;
        }
        let mut counted = 0;
        wait("the attack to be counted", || {
            counted = count(net).unwrap_or(0) - before.0;
            counted >= MANY as u64
        })
        .with_context(|| format!("{counted} of {MANY} were counted"))?;

        ensure!(endpoints(net)? == before.1, "an endpoint moved");
        talk.advance(1 << 20)?;
        net.wait_bump(7000, "scramble")?;
        net.wait_established()?;
        talk.finish()
    })
}

#[test]
fn replayed_datagrams() {
    isolated(|| {
        attack(
            client(),
            &["datagram_replayed"],
            Fate::Delivered,
            |heard, number| heard[number % heard.len()].clone(),
        )
    });
}

#[test]
fn spoofed_datagrams() {
    isolated(|| {
        // Heard, but from another address: an endpoint must not move for it.
        let elsewhere = "10.0.2.77:5300".parse()?;
        attack(
            elsewhere,
            &["datagram_replayed"],
            Fate::Delivered,
            |heard, number| heard[number % heard.len()].clone(),
        )
    });
}

#[test]
fn altered_datagrams() {
    isolated(|| {
        // Only the tag can tell: nothing else is wrong with them.
        let counters = ["datagram_unauthentic"];
        attack(client(), &counters, Fate::Swallowed, |heard, number| {
            let mut datagram = heard[number % heard.len()].clone();
            *datagram.last_mut().expect("no datagram is empty") ^= 1;
            datagram
        })
    });
}

#[test]
fn truncated_datagrams() {
    isolated(|| {
        let counters = [
            "datagram_unauthentic",
            "datagram_malformed",
            "datagram_replayed",
        ];
        attack(client(), &counters, Fate::Delivered, |heard, number| {
            let datagram = &heard[number % heard.len()];
            datagram[..1 + number * (datagram.len() - 1) / MANY].to_vec()
        })
    });
}

#[test]
fn random_datagrams() {
    isolated(|| {
        let counters = [
            "datagram_unknown_index",
            "datagram_malformed",
            "handshake_wrong_mac1",
            "handshake_malformed",
        ];
        attack(client(), &counters, Fate::Delivered, |_, number| {
            let mut state = number as u32 + 1;
            let mut byte = || {
                // Xorshift32.
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                (state >> 24) as u8
            };
            (0..1 + number * 7).map(|_| byte()).collect()
        })
    });
}
