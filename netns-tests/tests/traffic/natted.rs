//! Live connections through routers that translate addresses: moved in both directions, and refused where they cannot be.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::thread;

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::homes::{Homes, server};
use netns_tests::isolated;
use netns_tests::routed::exchange;
use nix::sys::signal::Signal;

/// Bytes of an exchange.
const SOME: usize = 200_000;
/// Bytes that fit into every window, so that routers that follow the numbers know the connection still.
const FEW: usize = 2_000;
/// The port that connections come from, on both laptops.
const FROM: u16 = 40_000;

/// Two laptops with the same address and port have connections in plain; their routers gave each another port or address.
#[test]
fn live_connections_move_through_two_translations() {
    isolated(|| {
        Homes::run(|net| {
            let mut conns = [net.connect(0, FROM, 7000)?, net.connect(1, FROM, 7000)?];
            for conn in &mut conns {
                exchange(conn, SOME)?;
            }
            for (at, laptop) in net.laptops.iter().enumerate() {
                laptop.ctl(&["enable", "--dport", "7000", "--bump", "seal"])?;
                ensure!(laptop.bumps(7000)? == ["seal"]);
                exchange(&mut conns[at], FEW)?;
                laptop.wait_locked(7000)?;
            }
            ensure!(net.b.bumps(7000)? == ["seal", "seal"]);
            for conn in &mut conns {
                exchange(conn, FEW)?;
            }
            // The names outlive each daemon.
            net.b.stop(Signal::SIGKILL)?;
            net.b.start()?;
            for conn in &mut conns {
                exchange(conn, FEW)?;
            }
            net.laptops[0].ctl(&["disable", "--dport", "7000"])?;
            net.laptops[1].ctl(&["disable", "--dport", "7000"])?;
            ensure!(net.laptops[0].bumps(7000)? == ["plain"]);
            for conn in &mut conns {
                exchange(conn, SOME)?;
            }
            drop(conns);
            wait("the names are forgotten", || {
                let file = std::fs::read_to_string(net.b.directory().join("dibsd.state"));
                file.is_ok_and(|text| text.contains("\"matched\": []"))
            })
        })
    });
}

/// A proxy at the router ends the laptop's connection, and makes one of its own to the server.
#[test]
fn a_connection_through_a_proxy_is_refused_and_unharmed() {
    isolated(|| {
        Homes::run(|net| {
            let home = net.homes[0].clone();
            home.shell(
                "nft 'add chain ip nat pre { type nat hook prerouting priority -100; }'\n\
                 nft add rule ip nat pre iifname lan0 tcp dport 7000 redirect to :9999",
            )?;
            let proxy = home.in_ns(|| TcpListener::bind(("0.0.0.0", 9999)))?;
            let relay = thread::spawn(move || -> Result<()> {
                let (near, _) = proxy.accept()?;
                let far = home.in_ns(|| TcpStream::connect(server(7000)))?;
                let (mut to, mut from) = (far.try_clone()?, near.try_clone()?);
                let up = thread::spawn(move || io::copy(&mut from, &mut to));
                io::copy(&mut &far, &mut &near).context("down")?;
                up.join()
                    .expect("it does not panic")
                    .context("up")
                    .map(drop)
            });
            let mut conn = net.connect(0, FROM, 7000)?;
            exchange(&mut conn, SOME)?;
            let laptop = &net.laptops[0];
            let said = laptop.refused(&["enable", "--dport", "7000", "--bump", "seal"])?;
            ensure!(
                said.contains("nothing of it arrives there as it was sent"),
                "{said}"
            );
            ensure!(laptop.bumps(7000)? == ["plain"]);
            exchange(&mut conn, SOME)?;
            drop(conn);
            relay.join().expect("it does not panic")
        })
    });
}
