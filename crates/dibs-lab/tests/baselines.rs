//! The systems that dibs is compared with come up and carry data.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::Result;
use dibs_lab::load::{Latency, Throughput, Transport};
use dibs_lab::{Host, Lab, LinkSpec, baseline, isolated_alone};

const SECOND: Duration = Duration::from_secs(1);
const FIRST: &str = "10.0.1.2";
const SECOND_ADDRESS: &str = "10.0.2.2";

/// Two hosts with two links of 100 Mbit/s.
fn two_links() -> Result<(Lab, Host, Host)> {
    let mut lab = Lab::new()?;
    let (a, b) = (lab.host("a")?, lab.host("b")?);
    for n in [1, 2] {
        let (interface, near, far) = (
            format!("eth{n}"),
            format!("10.0.{n}.1/24"),
            format!("10.0.{n}.2/24"),
        );
        lab.link(LinkSpec::new(&a, &interface, &near, &b, &interface, &far).shaped(100_000_000))?;
    }
    Ok((lab, a, b))
}

fn megabits(a: &Host, b: &Host, to: IpAddr, transport: Transport) -> Result<f64> {
    let load = Throughput::new(SocketAddr::new(to, 700)).transport(transport);
    let report = load.duration(2 * SECOND).run(a, b)?;
    println!("{}", serde_json::to_string(&report)?);
    Ok(report.bits_per_second / 1e6)
}

#[test]
fn mptcp_uses_both_links() {
    isolated_alone(|| {
        let (_lab, a, b) = two_links()?;
        let single = megabits(&a, &b, FIRST.parse()?, Transport::Mptcp)?;
        assert!(single < 100.0, "{single}");
        baseline::mptcp(&a, &b, &[SECOND_ADDRESS.parse()?])?;
        let both = megabits(&a, &b, FIRST.parse()?, Transport::Mptcp)?;
        assert!(both > 150.0, "{both}");
        Ok(())
    });
}

#[test]
fn openvpn_carries_data() {
    isolated_alone(|| {
        let (_lab, a, b) = two_links()?;
        let tunnel = baseline::openvpn((&a, "10.0.1.1".parse()?), (&b, FIRST.parse()?))?;
        let rate = megabits(&a, &b, tunnel.b, Transport::Tcp)?;
        assert!((50.0..100.0).contains(&rate), "{rate}");
        let report = Latency::new(SocketAddr::new(tunnel.b, 700))
            .duration(SECOND)
            .run(&a, &b)?;
        println!("{}", serde_json::to_string(&report)?);
        Ok(())
    });
}

/// Needs a Go toolchain and its module proxy: for the benchmark, not for every run of the tests.
#[test]
#[ignore = "needs a Go toolchain and network access"]
fn wireguard_go_carries_data() {
    let cache = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let program = baseline::build_wireguard_go(cache).unwrap();
    isolated_alone(|| {
        let (_lab, a, b) = two_links()?;
        let near = (&a, "10.0.1.1".parse()?);
        let tunnel = baseline::wireguard_go(&program, near, (&b, FIRST.parse()?))?;
        let rate = megabits(&a, &b, tunnel.b, Transport::Tcp)?;
        assert!((50.0..100.0).contains(&rate), "{rate}");
        Ok(())
    });
}
