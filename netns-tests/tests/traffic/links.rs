//! Links go and come under a connection on a bump.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::End;
use netns_tests::daemon::wait;
use netns_tests::traffic::Talk;
use netns_tests::{Net, Setup, isolated};

/// Waits until the path carries data again, and not only probes.
fn carries_again(net: &Net, talk: &Talk, path: &str) -> Result<()> {
    for node in [&net.a, &net.b] {
        node.wait_path(path, "up")?;
    }
    let sent = || {
        let path = net.a.path(path)?;
        path["bytes_sent"].as_u64().context("bytes_sent")
    };
    let before = sent()?;
    wait("data on the path", || {
        sent().is_ok_and(|sent| sent > before + (256 << 10))
    })?;
    talk.advance(1 << 20)
}

#[test]
fn the_untrusted_link_down_and_up() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            for end in End::BOTH {
                net.wlan.down(end)?;
                talk.advance(2 << 20)?;
                net.a.wait_path("wlan", "down")?;
                net.wlan.up(end)?;
                carries_again(net, &talk, "wlan")?;
            }
            talk.finish()
        })
    });
}

#[test]
fn an_interface_takes_other_sizes_meanwhile() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            let resize = |mtu: u32| -> Result<()> {
                for node in [&net.a, &net.b] {
                    // The token bucket takes no packet that is longer than its burst.
                    node.host.run("tc qdisc replace dev wlan0 root noqueue")?;
                    node.host.run(&format!("ip link set wlan0 mtu {mtu}"))?;
                }
                Ok(())
            };
            for mtu in [9000, 1300, 1500] {
                resize(mtu)?;
                wait("the datagrams to fit", || {
                    net.a.path("wlan").is_ok_and(|path| path["mtu"] == mtu - 28)
                })?;
                talk.advance(2 << 20)?;
            }
            resize(1227)?;
            net.a.wait_path("wlan", "down")?;
            let path = net.a.path("wlan")?;
            let reason = "its interface has an MTU of 1227 bytes, and 1228 are needed: raise it";
            ensure!(path["reason"] == reason, "{path}");
            talk.advance(2 << 20)?;
            resize(1500)?;
            carries_again(net, &talk, "wlan")?;
            talk.finish()
        })
    });
}

/// It keeps its number, and the socket is still bound to it.
#[test]
fn an_interface_has_another_name_meanwhile() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            for (from, to) in [("wlan0", "other"), ("other", "wlan0")] {
                let host = &net.a.host;
                host.run(&format!("ip link set {from} name {to}"))?;
                let state = if to == "wlan0" { "up" } else { "down" };
                net.a.wait_path("wlan", state)?;
                talk.advance(2 << 20)?;
            }
            carries_again(net, &talk, "wlan")?;
            talk.finish()
        })
    });
}

#[test]
fn an_address_comes_after_the_daemon() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let file = net.a.directory().join("dibsd.toml");
            let interface = "interface = \"wlan0\"\n";
            let config = std::fs::read_to_string(file)?;
            let with_address = format!("{interface}address = \"10.0.2.1\"\n");
            net.a.configure(&config.replace(interface, &with_address))?;
            net.a.host.run("ip address del 10.0.2.1/24 dev wlan0")?;
            net.a.start()?;
            net.b.start()?;
            net.a.wait_path("eth", "up")?;
            net.a.wait_path("wlan", "down")?;
            net.a.host.run("ip address add 10.0.2.1/24 dev wlan0")?;
            net.a.wait_path("wlan", "up")
        })
    });
}

#[test]
fn the_untrusted_link_swallows_everything_for_a_while() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            for command in ["-I", "-D"] {
                for node in [&net.a, &net.b] {
                    let drop = format!("iptables -t raw {command} PREROUTING -i wlan0 -j DROP");
                    node.host.run(&drop)?;
                }
                talk.advance(2 << 20)?;
            }
            carries_again(net, &talk, "wlan")?;
            talk.finish()
        })
    });
}

#[test]
fn without_the_trusted_link_data_is_held() {
    isolated(|| {
        Setup::new().run(|net| {
            let mut ears = net.eavesdrop()?;
            let talk = net.bumped()?;
            ears.from_now();
            net.eth.down(End::A)?;
            talk.stands_still(Duration::from_secs(1))?;
            net.eth.up(End::A)?;
            carries_again(net, &talk, "eth")?;
            talk.finish_unheard(ears, 1 << 20)
        })
    });
}

#[test]
fn without_the_trusted_link_data_goes_on_if_so_configured() {
    isolated(|| {
        let setup = Setup::new().key("on_trusted_down = \"untrusted\"");
        setup.run(|net| {
            let mut ears = net.eavesdrop()?;
            let talk = net.bumped()?;
            ears.from_now();
            net.eth.down(End::A)?;
            net.a.wait_path("eth", "down")?;
            talk.advance(2 << 20)?;
            net.eth.up(End::A)?;
            carries_again(net, &talk, "eth")?;
            talk.finish_unheard(ears, 1 << 20)
        })
    });
}

#[test]
fn both_links_down_and_up() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            net.eth.down(End::B)?;
            net.wlan.down(End::A)?;
            talk.stands_still(Duration::from_secs(1))?;
            net.wlan.up(End::A)?;
            net.eth.up(End::B)?;
            carries_again(net, &talk, "eth")?;
            carries_again(net, &talk, "wlan")?;
            ensure!(net.a.bumps(7000)? == ["scramble"]);
            talk.finish()
        })
    });
}
