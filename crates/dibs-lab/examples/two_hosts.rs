//! Two hosts, an emulated link, a transfer: `cargo run -p dibs-lab --example two_hosts`.

use std::time::Duration;

use dibs_lab::load::{Latency, Throughput};
use dibs_lab::{Conditions, Lab, LinkSpec};

fn main() -> anyhow::Result<()> {
    dibs_netns::enter()?;
    let mut lab = Lab::new()?;
    let (a, b) = (lab.host("a")?, lab.host("b")?);
    let conditions = Conditions::new()
        .rate(100_000_000)
        .delay(Duration::from_millis(5))
        .loss(1e-4);
    let link = lab.link(
        LinkSpec::new(&a, "eth0", "10.0.1.1/24", &b, "eth0", "10.0.1.2/24").emulated(conditions),
    )?;
    let to = "10.0.1.2:7000".parse()?;
    println!("{}", serde_json::to_string(&Latency::new(to).run(&a, &b)?)?);
    println!(
        "{}",
        serde_json::to_string(&Throughput::new(to).run(&a, &b)?)?
    );
    println!("{:?}", link.stats(dibs_lab::End::A)?);
    Ok(())
}
