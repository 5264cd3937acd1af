//! The systems that dibs is compared with come up and carry data.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::Result;
use dibs_lab::load::{Latency, Throughput, Transport};
use dibs_lab::{Lab, LinkSpec, baseline};
use dibs_netns::{Host, isolated};

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

/// Carries some megabytes; returns by how many subflows.
fn carries(a: &Host, b: &Host, to: IpAddr, transport: Transport) -> Result<u32> {
    let load = Throughput::new(SocketAddr::new(to, 700)).transport(transport);
    let report = load.bytes(8 << 20).run(a, b)?;
    println!("{}", serde_json::to_string(&report)?);
    assert_eq!(report.bytes, 8 << 20);
    Ok(report.subflows)
}

#[test]
fn mptcp_uses_both_links() {
    isolated(|| {
        let (_lab, a, b) = two_links()?;
        let sent = || -> Result<[u64; 2]> {
            let sent = |name| a.counters(name).map(|counted| counted.tx_bytes);
            Ok([sent("eth1")?, sent("eth2")?])
        };
        let before = sent()?;
        let subflows = carries(&a, &b, FIRST.parse()?, Transport::Mptcp)?;
        assert_eq!(subflows, 1);
        let single = sent()?;
        let [first, second] = [0, 1].map(|link| single[link] - before[link]);
        assert!(first > 8 << 20 && second < 64 << 10, "{first} and {second}");
        baseline::mptcp(&a, &b, &[SECOND_ADDRESS.parse()?])?;
        let subflows = carries(&a, &b, FIRST.parse()?, Transport::Mptcp)?;
        assert_eq!(subflows, 2);
        let both = sent()?;
        // Which carries how much is for the kernel to say.
        let [first, second] = [0, 1].map(|link| both[link] - single[link]);
        assert!(
            first.min(second) > 64 << 10,
            "{first} and {second} bytes by the two links"
        );
        Ok(())
    });
}

#[test]
fn openvpn_carries_data() {
    isolated(|| {
        let (_lab, a, b) = two_links()?;
        let tunnel = baseline::openvpn((&a, "10.0.1.1".parse()?), (&b, FIRST.parse()?))?;
        carries(&a, &b, tunnel.b, Transport::Tcp)?;
        let to = SocketAddr::new(tunnel.b, 700);
        let report = Latency::measured([&a, &b], to, Transport::Tcp, SECOND)?;
        println!("{}", serde_json::to_string(&report)?);
        Ok(())
    });
}
