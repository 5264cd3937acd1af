//! A peer whose daemon asks without end, beside others that ask little: each gets its turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_config::PrivateKey;
use dibs_core::bump::SCRAMBLE;
use dibs_netns::Host;
use dibs_switch::conns::Socket;
use dibs_switch::messages::{Body, MAX_ENTRIES, MAX_SOUGHT, Message, Named, Outcome};
use dibs_wire::FlowKey;
use netns_tests::daemon::{SOON, wait};
use netns_tests::hostile::HostilePeer;
use netns_tests::routed::exchange;
use netns_tests::traffic::connect;
use netns_tests::{Net, Setup, isolated};

/// Network of the guests.
const LAN: &str = "10.0.3";
/// Messages of a peer that a daemon has not dealt with, at most.
const PLACES: usize = 256;
/// Those of another peer that may be answered first: some, for they take turns, and far fewer than wait.
const FEW: usize = PLACES / 4;

/// Makes the daemon of `a` know two peers more, which are the test's own and have addresses of this network, and starts both daemons.
/// Both are at `10.0.3.3`.
fn with_guests(net: &mut Net, network: &str) -> Result<(Host, [HostilePeer; 2])> {
    let host = net.intruder()?;
    let file = net.a.directory().join("dibsd.toml");
    let mut config = std::fs::read_to_string(file)?;
    config.push_str("\n[[path]]\nname = \"lan\"\ninterface = \"lan0\"\ntrust = \"trusted\"\n");
    let keys = [PrivateKey::generate(), PrivateKey::generate()];
    for (key, (name, number)) in keys.iter().zip([("many", 3), ("few", 4)]) {
        let public = key.public();
        config.push_str(&format!(
            "\n[[peer]]\nname = \"{name}\"\npublic_key = \"{public}\"\naddresses = [\"{network}.{number}/32\"]\n"
        ));
    }
    net.a.configure(&config)?;
    net.a.start()?;
    net.b.start()?;
    net.b.wait_established()?;
    let guest = |key, at: &str| HostilePeer::guest(net, &host, at.parse()?, key);
    let guests = [
        guest(&keys[0], "10.0.3.3:5300")?,
        guest(&keys[1], "10.0.3.3:5301")?,
    ];
    Ok((host, guests))
}

/// A question that takes the daemon of `a` as long as one may: of connections that it has to look for.
fn question(request: u32) -> Vec<u8> {
    let named = |port| Named {
        pair: FlowKey::tcp(([10, 0, 3, 3], port), ([10, 0, 3, 1], 80)),
        socket: Socket::UNKNOWN,
    };
    let conns = (0..MAX_ENTRIES as u16).map(|n| named(30_000 + n)).collect();
    let bump = SCRAMBLE;
    let body = Body::Confirm { bump, conns };
    Message { request, body }.encode()
}

/// Asks as much as it gets rid of, and sends and receives; returns how many answers came.
fn flood(peer: &mut HostilePeer, request: &mut u32) -> Result<usize> {
    while peer.say(&question(*request))? {
        *request = request.wrapping_add(1);
    }
    peer.work()?;
    Ok(peer.heard().len())
}

/// Floods until it is told to stop.
fn keep_flooding(
    host: &Host,
    mut peer: HostilePeer,
    stop: &Arc<AtomicBool>,
) -> Result<JoinHandle<Result<usize>>> {
    let stop = Arc::clone(stop);
    host.thread("flood", move || {
        let (mut request, mut answers) = (1 << 20, 0);
        while !stop.load(Ordering::Relaxed) {
            answers += flood(&mut peer, &mut request)?;
        }
        Ok(answers)
    })
}

/// `b`, which is no guest, has its connection go into a bump, be locked, and leave it. Says how long each took.
fn there_and_back(net: &Net, how: &str) -> Result<()> {
    let begin = Instant::now();
    net.b.switch("enable", "--sport", 7000)?;
    let enabled = begin.elapsed();
    net.wait_bump(7000, "scramble")?;
    net.wait_locked(7000)?;
    let locked = begin.elapsed();
    let begin = Instant::now();
    net.b.switch("disable", "--sport", 7000)?;
    let disabled = begin.elapsed();
    net.wait_bump(7000, "plain")?;
    println!("{how}: enabled {enabled:?}, locked {locked:?}, disabled {disabled:?}");
    Ok(())
}

#[test]
fn a_peer_that_asks_without_end_holds_up_no_other() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let (host, [mut many, mut few]) = with_guests(net, LAN)?;
            let talk = net.talk(7000)?;
            let mut request = 0;
            let mut answered = 0;
            let begin = Instant::now();
            // As many wait as there are places for, and none is lost count of.
            while net.a.counter("messages_refused")? == 0 {
                ensure!(
                    begin.elapsed() < SOON,
                    "{request} questions found room, {answered} were answered"
                );
                for _ in 0..100 {
                    answered += flood(&mut many, &mut request)?;
                }
            }
            for round in 0..10 {
                let ours = 77 + round;
                ensure!(few.say(&question(ours))?, "no room for one question");
                let (mut before, begin) = (0, Instant::now());
                loop {
                    before += flood(&mut many, &mut request)?;
                    few.work()?;
                    let heard = few.heard();
                    let answers = heard.iter().filter_map(|bytes| Message::decode(bytes).ok());
                    if { answers }.any(|answer| {
                        answer.request == ours && matches!(answer.body, Body::Answer(_))
                    }) {
                        break;
                    }
                    ensure!(begin.elapsed() < SOON, "no answer; {before} to the other");
                }
                println!("{before} questions of the other peer were answered first");
                ensure!(before <= FEW, "{before} questions went first");
            }

            let stop = Arc::new(AtomicBool::new(false));
            let flooding = keep_flooding(&host, many, &stop)?;
            let refused = net.a.counter("messages_refused")?;
            for round in 0..3 {
                there_and_back(net, &format!("round {round}, beside a flood"))?;
            }
            ensure!(!flooding.is_finished(), "the flood ended first");
            ensure!(
                net.a.counter("messages_refused")? > refused,
                "the flood was none"
            );
            talk.advance(1 << 20)?;
            stop.store(true, Ordering::Relaxed);
            let answers = { flooding.join() }.map_err(|_| anyhow::anyhow!("it panicked"))??;
            println!("{answers} answers to the flood");
            for round in 0..3 {
                there_and_back(net, &format!("round {round}, alone"))?;
            }
            wait("what was lost to be none", || {
                let peers = net.a.ctl(&["peer", "list"]);
                peers.is_ok_and(|peers| peers[0]["state"] == "established")
            })?;
            talk.finish().context("the talk")
        })
    });
}

/// Each question may name no connection at all; that of a MATCH used to end the daemon.
#[test]
fn questions_about_nothing_are_answered_with_nothing() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let (_host, [mut peer, _]) = with_guests(net, LAN)?;
            let nothing = |body| (body, Vec::new());
            let bump = SCRAMBLE;
            let conns = Vec::new();
            let questions = [
                nothing(Body::Match(Vec::new())),
                nothing(Body::Knock(Vec::new())),
                nothing(Body::Hide(Vec::new())),
                nothing(Body::Confirm { bump, conns }),
                // The answer is of all ports together.
                (Body::Seek(Vec::new()), vec![(Outcome::NoConnection, 0)]),
            ];
            for (request, (body, answer)) in (1..).zip(questions) {
                let question = Message { request, body };
                ensure!(peer.say(&question.encode())?, "no room for one question");
                let body = Body::Answer(answer);
                let answer = Message { request, body };
                wait(&format!("an answer to {question:?}"), || {
                    let worked = peer.work().is_ok();
                    worked && peer.heard().contains(&answer.encode())
                })?;
            }
            net.a.ctl(&["status"]).map(drop)
        })
    });
}

/// The guest has a connection, so there is something to show; it never says whether it saw it. Nothing is shown twice at once.
#[test]
fn a_peer_that_seeks_without_end_is_shown_a_connection_once() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let (host, [mut many, _]) = with_guests(net, LAN)?;
            let mut own = connect(&net.a.host, &host, "10.0.3.3:7001".parse()?)?;
            let talk = net.talk(7000)?;
            let seek = |request| {
                let body = Body::Seek((0..MAX_SOUGHT as u16).map(|n| 7001 + n).collect());
                Message { request, body }.encode()
            };
            let (mut request, mut shown, mut answers) = (1, 0, 0);
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_secs(3) {
                while many.say(&seek(request))? {
                    request += 1;
                }
                many.work()?;
                let heard = many.heard();
                for message in heard.iter().filter_map(|bytes| Message::decode(bytes).ok()) {
                    match message.body {
                        Body::Match(_) => shown += 1,
                        Body::Answer(_) => answers += 1,
                        _ => {}
                    }
                }
            }
            println!("{request} questions, {answers} answers, {shown} times shown");
            ensure!(answers > PLACES, "{answers} answers to {request} questions");
            // What is not answered is asked again.
            ensure!((1..=8).contains(&shown), "shown {shown} times");
            exchange(&mut own, 100_000)?;
            there_and_back(net, "after the flood")?;
            talk.finish()
        })
    });
}

/// Both guests could have the connection of the router's address. One says that it is about to show more than there can be.
#[test]
fn a_peer_that_shows_less_than_it_says_holds_up_nobody_for_long() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let (host, mut guests) = with_guests(net, "10.0.4")?;
            let mut conn = connect(&host, &net.a.host, "10.0.3.1:7001".parse()?)?;
            let done = AtomicBool::new(false);
            let said = std::thread::scope(|scope| -> Result<String> {
                let asking = scope.spawn(|| {
                    let said = net
                        .a
                        .refused(&["enable", "--sport", "7001", "--bump", "scramble"]);
                    done.store(true, Ordering::Relaxed);
                    said
                });
                let mut sought = [0; 2];
                while !done.load(Ordering::Relaxed) {
                    for (guest, sought) in guests.iter_mut().zip(&mut sought) {
                        guest.work()?;
                        let heard = guest.heard();
                        let asked = heard.iter().filter_map(|bytes| Message::decode(bytes).ok());
                        for Message { request, .. } in
                            asked.filter(|asked| asked.body == Body::Seek(vec![7001]))
                        {
                            *sought += 1;
                            let body = Body::Answer(vec![(Outcome::Done, u64::MAX)]);
                            guest.say(&Message { request, body }.encode())?;
                        }
                    }
                }
                ensure!(sought == [1; 2], "asked {sought:?} times");
                asking.join().expect("it does not panic")
            })?;
            ensure!(said.contains("the peer does not know them"), "{said}");
            exchange(&mut conn, 100_000)
        })
    });
}
