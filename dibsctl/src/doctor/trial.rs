//! Trying out what dibs needs of the kernel, with the daemon's own means, in a network namespace that nobody
//! else uses: this host's network sees nothing of it.

use std::thread;

use dibs_io::Tun;
use dibs_policy::conntrack::Conntrack;
use dibs_policy::{
    Backstop, BumpRoute, ClassRule, Desired, DeviceName, DeviceOwner, Hours, Known, Standing,
    Steering,
};
use dibs_settings::{BumpId, Term};
use nix::sched::{CloneFlags, unshare};

use super::finding::Finding;
use crate::output::runtime;

/// What the trial came to.
pub(crate) enum Trial {
    /// Only root may make a namespace.
    NeedsRoot,
    /// There is no namespace to be had.
    Impossible(String),
    /// Each part in turn.
    Done(Parts),
}

/// What works; an error is why not.
pub(crate) struct Parts {
    /// Making a TUN with the offloads.
    pub(crate) tun: Result<(), String>,
    /// Chains, rules and routes; what was left out of them.
    pub(crate) steering: Result<Vec<String>, String>,
    /// nftables.
    pub(crate) backstop: Result<Standing, String>,
    /// Connection tracking.
    pub(crate) conntrack: Result<(), String>,
    /// What rules may name and this kernel does not match.
    pub(crate) matches: Vec<(&'static str, String)>,
}

/// Tries.
pub(crate) async fn run(root: bool) -> Trial {
    if !root {
        return Trial::NeedsRoot;
    }
    let tried = thread::spawn(|| {
        // Of this thread alone.
        unshare(CloneFlags::CLONE_NEWNET).map_err(|error| error.to_string())?;
        let runtime = runtime().map_err(|error| error.to_string())?;
        Ok(runtime.block_on(parts()))
    });
    match tried.join() {
        Ok(Ok(parts)) => Trial::Done(parts),
        Ok(Err(error)) => Trial::Impossible(error),
        Err(_) => Trial::Impossible("the trial panicked".to_owned()),
    }
}

async fn parts() -> Parts {
    let desired = desired();
    let device = desired.bumps[0].device.to_string();
    let tun = Tun::open(&device, u16::MAX);
    let said = |error: dibs_policy::Error| error.to_string();
    let mut matches = Vec::new();
    let steered = async {
        let mut steering = Steering::system(None)?;
        let report = steering.set(&desired).await?;
        for (name, rule) in optional() {
            if let Err(error) = steering.probe(&rule, &dibs_policy::Family::BOTH).await {
                matches.push((name, error.to_string()));
            }
        }
        Ok(report.warnings)
    };
    let steering = steered.await.map_err(said);
    let backed = async {
        let mut backstop = Backstop::open()?;
        let set = backstop.set(&desired, &Known::default()).await;
        match (set, backstop.standing()) {
            (Ok(_), standing) | (Err(_), standing @ Standing::Missing) => Ok(standing.clone()),
            (Err(error), _) => Err(error),
        }
    };
    let backstop = backed.await.map_err(said);
    let tracked = async {
        let mut conntrack = Conntrack::open()?;
        conntrack.list(|_| None::<()>).await
    };
    Parts {
        tun: tun.map(drop).map_err(|error| error.to_string()),
        steering,
        backstop,
        conntrack: tracked.await.map(drop).map_err(said),
        matches,
    }
}

/// One bump for one peer of each IP version, with a rule as most have it.
fn desired() -> Desired {
    let bump = BumpId::new(1).expect("one is a bump");
    let parse = "a literal address";
    let route = BumpRoute {
        id: bump,
        device: DeviceName::new("dibs1").expect("a plain name"),
        owner: DeviceOwner::Ours,
        addresses: ["192.0.2.1", "2001:db8::1"]
            .map(|address| address.parse().expect(parse))
            .to_vec(),
        peers: ["192.0.2.2/32", "2001:db8::2/128"]
            .map(|peer| peer.parse().expect(parse))
            .to_vec(),
    };
    let rule = ClassRule {
        dport: Some(80.into()),
        uid: Some(1),
        ..ClassRule::tcp(1, bump)
    };
    Desired {
        bumps: vec![route],
        rules: vec![rule],
        ..Desired::default()
    }
}

/// What rules may name that takes a module of its own.
fn optional() -> [(&'static str, ClassRule); 2] {
    let rule = ClassRule::tcp(1, BumpId::new(1).expect("one is a bump"));
    let dscp = ClassRule {
        terms: vec![Term::Dscp(46)],
        ..rule.clone()
    };
    let time = ClassRule {
        hours: Some(Hours {
            start: 0,
            end: 3600,
        }),
        ..rule
    };
    [("dscp", dscp), ("time", time)]
}

/// What it means.
pub(crate) fn judge(trial: Trial) -> Vec<Finding> {
    let parts = match trial {
        Trial::NeedsRoot => return vec![Finding::needs_root("steering")],
        Trial::Impossible(why) => {
            return vec![Finding::skipped(
                "steering",
                format!("there is no network namespace to try it in: {why}"),
                "run doctor where network namespaces can be made",
            )];
        }
        Trial::Done(parts) => parts,
    };
    let mut findings = vec![
        match parts.tun {
            Ok(()) => Finding::fine("tun_device", "a TUN can be made"),
            Err(why) => Finding::failed(
                "tun_device",
                why,
                "load the kernel module tun (modules-load.d/dibs.conf)",
            ),
        },
        match parts.steering {
            Ok(left_out) if left_out.is_empty() => Finding::fine(
                "steering",
                "the kernel and iptables take all that steering needs",
            ),
            Ok(left_out) => Finding::warning(
                "steering",
                left_out.join("; "),
                "load the kernel modules of modules-load.d/dibs.conf, and update iptables",
            ),
            Err(why) => Finding::failed(
                "steering",
                why,
                "install iptables, and load the kernel modules of modules-load.d/dibs.conf",
            ),
        },
        backstop(parts.backstop),
        match parts.conntrack {
            Ok(()) => Finding::fine("conntrack", "connections can be tracked and marked"),
            Err(why) => Finding::failed(
                "conntrack",
                why,
                "load the kernel module nf_conntrack_netlink",
            ),
        },
    ];
    findings.extend(parts.matches.into_iter().map(|(name, why)| {
        Finding::warning(
            "match",
            why,
            format!("write no rules with {name}, or load the kernel module xt_{name}"),
        )
        .about(name)
    }));
    findings
}

fn backstop(standing: Result<Standing, String>) -> Finding {
    let flushed = "while others flush nftables, packets of connections on a bump may leave in plain: use \
                   Linux 5.12 or later with nf_tables";
    match standing {
        Ok(Standing::Stands(dibs_policy::Strength::Shared)) => {
            Finding::warning("backstop", "others can flush the table of dibs", flushed)
        }
        Ok(Standing::Missing) => {
            Finding::warning("backstop", "this kernel has no nftables", flushed)
        }
        Ok(Standing::Failed(why)) | Err(why) => Finding::failed(
            "backstop",
            why,
            "let the kernel have nf_tables with the modules nft_ct and nft_nat",
        ),
        Ok(Standing::Stands(strength)) => Finding::fine("backstop", strength.to_string()),
        Ok(Standing::Idle) => Finding::fine("backstop", "there is nothing to keep in"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;

    fn good() -> Parts {
        Parts {
            tun: Ok(()),
            steering: Ok(Vec::new()),
            backstop: Ok(Standing::Stands(dibs_policy::Strength::Lasting)),
            conntrack: Ok(()),
            matches: Vec::new(),
        }
    }

    fn outcomes(parts: Parts) -> Vec<(&'static str, Outcome)> {
        let findings = judge(Trial::Done(parts));
        findings.iter().map(|f| (f.check, f.outcome)).collect()
    }

    #[test]
    fn each_part_is_judged_by_itself() {
        assert!(outcomes(good()).iter().all(|(_, o)| *o == Outcome::Ok));
        let bad = Parts {
            steering: Err("no iptables".to_owned()),
            backstop: Ok(Standing::Missing),
            conntrack: Err("no".to_owned()),
            matches: vec![("time", "no".to_owned())],
            ..good()
        };
        assert_eq!(
            outcomes(bad),
            [
                ("tun_device", Outcome::Ok),
                ("steering", Outcome::Failed),
                ("backstop", Outcome::Warning),
                ("conntrack", Outcome::Failed),
                ("match", Outcome::Warning),
            ]
        );
    }

    #[test]
    fn without_root_nothing_is_tried() {
        let findings = judge(Trial::NeedsRoot);
        assert_eq!(findings[0].outcome, Outcome::Skipped);
    }
}
