//! `dibsctl speed`.

use anyhow::{Context as _, Result, ensure};
use dibs_lab::End;
use dibs_netns::HANG;
use netns_tests::daemon::wait;
use netns_tests::{Net, Setup, isolated};
use nix::sys::signal::Signal;
use serde_json::Value;

/// Bits a second of the slow path: so few that a busy machine carries them too.
const SLOW: u64 = 2_000_000;

/// Rates of a row, down and up.
fn rates(row: &Value) -> Result<[f64; 2]> {
    let rate = |key: &str| {
        let rate = row[key].as_f64().filter(|rate| *rate > 0.0);
        rate.with_context(|| format!("{key}: {row:#}"))
    };
    Ok([rate("down_rate")?, rate("up_rate")?])
}

#[test]
fn each_path_is_measured_in_both_directions_and_all_at_once() {
    isolated(|| {
        Setup::new().run(|net| {
            net.wlan.shape(SLOW)?;
            interrupted(net)?;
            let seen = net.a.ctl(&["speed", "--time", "6"])?;
            let rows = seen["paths"].as_array().context("paths")?;
            ensure!(seen["peer"] == "server" && rows.len() == 2, "{seen:#}");
            let row = |name: &str| rows.iter().find(|row| row["name"] == name);
            let eth = row("eth").with_context(|| format!("{seen:#}"))?;
            let wlan = row("wlan").with_context(|| format!("{seen:#}"))?;
            let rows = [rates(eth)?, rates(wlan)?, rates(&seen["all"])?];
            for direction in [0, 1] {
                let [eth, wlan, all] = rows.map(|rates| rates[direction]);
                ensure!(eth > wlan && all > wlan, "{seen:#}");
            }
            for path in [eth, wlan] {
                for trip in ["idle_us", "down_us", "up_us"] {
                    ensure!(path[trip].as_u64() > Some(0), "{seen:#}");
                }
            }
            silent(net)?;
            spared(net)?;
            refused(net)
        })
    });
}

/// A user who has enough leaves nothing behind, and another one waits for them.
fn interrupted(net: &Net) -> Result<()> {
    let speed = net.a.dibsctl(&["speed", "--path", "eth", "--time", "60"]);
    let speed = net.a.host.spawn(speed)?;
    let in_flight = || {
        let path = net.b.path("eth").unwrap_or_default();
        path["in_flight"].as_u64().unwrap_or_default()
    };
    wait("load from b", || in_flight() > 20_000)?;
    for (node, busy) in [(&net.a, "peer server"), (&net.b, "this host")] {
        let said = node.refused(&["speed", "--time", "1"])?;
        ensure!(
            said.contains(&format!("{busy} is measuring already")),
            "{said}"
        );
    }
    wait("load from b that goes on", || in_flight() > 20_000)?;
    speed.kill();
    wait("its end", || {
        net.a
            .ctl(&["speed", "--path", "eth", "--time", "1"])
            .is_ok()
    })
}

/// A path over which nothing comes any more has a rate still, for what it carried until then.
fn silent(net: &Net) -> Result<()> {
    let sent = || net.a.path("wlan")?["bytes_sent"].as_u64().context("bytes");
    let (before, span) = (sent()?, 2);
    let time = (2 * span).to_string();
    let speed = (net.a).dibsctl(&["speed", "--path", "wlan", "--time", &time]);
    let speed = net.a.host.spawn(speed)?;
    // The rate is counted from 0.4 of the span on, in which the link carries fewer bytes.
    let counted = before + SLOW / 8 * span * 6 / 10;
    wait("load from a", || sent().is_ok_and(|sent| sent > counted))?;
    let drop = "PREROUTING -i wlan0 -j DROP";
    net.a.host.run(&format!("iptables -t raw -I {drop}"))?;
    net.a.wait_path("wlan", "down")?;
    let said = speed.output(HANG)?;
    let seen: Value = serde_json::from_slice(&said.stdout).with_context(|| format!("{said:?}"))?;
    rates(&seen["paths"][0])?;
    net.a.host.run(&format!("iptables -t raw -D {drop}"))?;
    net.a.wait_path("wlan", "up")
}

/// Paths that cost something are measured only if they are named, whoever they cost.
fn spared(net: &Net) -> Result<()> {
    net.a.ctl(&["path", "role", "wlan", "backup"])?;
    net.b.ctl(&["path", "limit", "eth", "--data-cap", "1 TB"])?;
    let said = net.a.refused(&["speed", "--time", "2"])?;
    ensure!(said.contains("the peer spares it"), "{said}");
    let seen = net
        .a
        .ctl(&["speed", "server", "--path", "wlan", "--time", "1"])?;
    ensure!(seen["all"].is_null(), "{seen:#}");
    rates(&seen["paths"][0])?;
    net.a.ctl(&["path", "reset"])?;
    let seen = net.a.ctl(&["speed", "--time", "2"])?;
    let whys: Vec<_> = { seen["paths"].as_array().into_iter().flatten() }
        .map(|row| row["why"].as_str())
        .collect();
    ensure!(
        matches!(whys[..], [Some(why), None] if why.contains("the peer spares it")),
        "{seen:#}"
    );
    Ok(())
}

/// Each refusal says why.
fn refused(net: &mut Net) -> Result<()> {
    for (arguments, why) in [
        (
            &["nobody"][..],
            "there is no peer \"nobody\": choose one of server",
        ),
        (
            &["--path", "dsl"],
            "there is no path to server \"dsl\": choose one of eth, wlan",
        ),
    ] {
        let said = net.a.refused(&[&["speed"], arguments].concat())?;
        ensure!(said.contains(why), "{said}");
    }
    net.wlan.down(End::A)?;
    net.a.wait_path("wlan", "down")?;
    let said = net.a.refused(&["speed", "--path", "wlan"])?;
    ensure!(said.contains("path wlan cannot be measured: "), "{said}");
    net.b.stop(Signal::SIGTERM)?;
    net.a.wait_path("eth", "down")?;
    let said = net.a.refused(&["speed"])?;
    ensure!(
        said.contains("no path to server can be measured: eth, nothing comes back over it"),
        "{said}"
    );
    Ok(())
}
