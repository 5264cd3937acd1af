//! Faults that random histories found, as histories of their own: what a seed does changes with the
//! simulator, these do not.

mod between;
mod choices;
mod marks;
mod paths;
mod rules;
mod streams;

use std::time::Duration;

use dibs_core::Time;
use dibs_core::bump;
use dibs_core::counters::Counter;
use dibs_netem::Conditions;
use dibs_settings::{BumpId, Level};
use dibs_sim::adversary::Tamper;
use dibs_sim::coverage::Seen;
use dibs_sim::history::{Between, Leaving, Op, Order, PathSetup, Plan, Setup};
use dibs_sim::steering::ruling::{Rule, Selected};
use dibs_sim::{History, Report, World};

/// On no bump.
const PLAIN: Option<BumpId> = None;
const SCRAMBLE: Option<BumpId> = Some(bump::SCRAMBLE);
const SHARE: Option<BumpId> = Some(bump::SHARE);
const SEAL: Option<BumpId> = Some(bump::SEAL);

fn at(millis: u64) -> Time {
    Time::ZERO + Duration::from_millis(millis)
}

fn path(trusted: bool, link: Conditions) -> PathSetup {
    PathSetup {
        trusted: [trusted; 2],
        v6: false,
        mtu: 1500,
        link: [link.clone(), link],
    }
}

fn clean() -> Conditions {
    Conditions::new()
        .rate(50_000_000)
        .delay(Duration::from_millis(5))
}

fn setup(paths: Vec<PathSetup>) -> Setup {
    Setup {
        direct: clean(),
        tick: [Duration::from_micros(1); 2],
        clock: [0xffff_ff00, 7],
        ..Setup::ordinary(paths)
    }
}

fn plan(bytes: [u64; 2], order: Order, bump: [bool; 2]) -> Plan {
    Plan {
        bump: bump.map(|bump| if bump { SCRAMBLE } else { PLAIN }),
        ..Plan::ordinary(bytes, order, 64 << 10)
    }
}

fn run(setup: Setup, ops: Vec<(Time, Op)>) -> Report {
    let quiet = ops.last().map_or(Time::ZERO, |(at, _)| *at);
    let history = History { setup, ops, quiet };
    World::run(1, &history).unwrap_or_else(|f| panic!("{} at {:?}\n{}", f.what, f.at, f.state))
}

/// The same with time before all calms down, in which hosts stay unable to do what they are to do.
fn with_rest(mut ops: Vec<(Time, Op)>) -> Vec<(Time, Op)> {
    let last = ops.last().expect("something happens").0;
    ops.push((last + Duration::from_secs(5), Op::Control(0, 1)));
    ops
}

/// A connection that both ends can move, which speaks now and then and stays open.
fn lingering(bytes: [u64; 2]) -> Plan {
    Plan {
        lingers: true,
        keepalive: Some(Duration::from_secs(2)),
        ..plan(bytes, Order::Both, [false; 2])
    }
}
