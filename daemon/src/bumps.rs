//! The bumps that this daemon carries, and their numbers in marks and between daemons.

use std::collections::BTreeMap;

use dibs_config::{BumpConfig, BumpKind, Config};
use dibs_core::bump::{self, Bump, Padding, Scheme};
use dibs_policy::BumpId;

use crate::daemon::Daemon;
use crate::messages::{Body, Outcome};

/// Devices are numbered from here, in the file's order.
pub(crate) const FIRST_DEVICE: u8 = 8;

/// A number that no bump has.
pub(crate) const NOBODYS: u8 = 7;

/// A bump that connections can be put on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// For the user.
    pub name: String,
    /// In marks and on the wire.
    pub id: BumpId,
    /// What it does.
    pub kind: BumpKind,
    /// Of another program's device, its name.
    pub device: Option<String>,
}

/// The bumps of a configuration that connections can be put on.
pub fn carried(config: &Config) -> Vec<Carried> {
    let mut bumps = numbered(config);
    let one_path = |bump: &Carried| bump.kind == BumpKind::Share && config.paths.len() < 2;
    bumps.retain(|bump| !one_path(bump));
    bumps
}

/// The bumps that the node is told of: all but devices, and not sharing where there is but one path.
pub fn for_node(config: &Config) -> Vec<Bump> {
    let of = |bump: &BumpConfig| match bump.kind {
        BumpKind::Scramble => Some(bump::scramble()),
        BumpKind::Share => bump.shares.map(|(needed, shares)| {
            let scheme = Scheme::new(needed, shares);
            bump::share(scheme.expect("the configuration was checked"))
        }),
        BumpKind::Seal => Some(bump::seal(match bump.padding {
            true => Padding::Buckets,
            false => Padding::None,
        })),
        BumpKind::Device => None,
    };
    config.bumps.iter().filter_map(of).collect()
}

/// All bumps of a configuration.
fn numbered(config: &Config) -> Vec<Carried> {
    let mut devices = FIRST_DEVICE..;
    let bumps = config.bumps.iter().map(|bump| {
        let number = match bump.kind {
            BumpKind::Scramble => bump::SCRAMBLE,
            BumpKind::Share => bump::SHARE,
            BumpKind::Seal => bump::SEAL,
            BumpKind::Device => devices.next().expect("there are few devices"),
        };
        Carried {
            name: bump.name.clone(),
            id: BumpId::new(number).expect("the configuration bounds the devices"),
            kind: bump.kind.clone(),
            device: bump.device.clone(),
        }
    });
    bumps.collect()
}

/// Numbers of bumps as somebody else has them, or we had them ourselves: for each that is a device, the
/// number that the bump of its name has here.
pub(crate) fn translation<'a>(
    bumps: &[Carried],
    devices: impl IntoIterator<Item = (u8, &'a str)>,
) -> BTreeMap<u8, u8> {
    let own = |name: &str| {
        let mut devices = bumps.iter().filter(|bump| bump.device.is_some());
        Some(devices.find(|bump| bump.name == name)?.id.get())
    };
    let known = devices
        .into_iter()
        .filter(|(number, _)| *number >= FIRST_DEVICE);
    known
        .filter_map(|(number, name)| Some((number, own(name)?)))
        .collect()
}

/// Our number of a bump that has this one elsewhere; [`NOBODYS`] if it has none here.
pub(crate) fn translated(devices: &BTreeMap<u8, u8>, number: u8) -> u8 {
    match number {
        FIRST_DEVICE.. => devices.get(&number).copied().unwrap_or(NOBODYS),
        own => own,
    }
}

impl Daemon {
    /// The bumps that are devices, by number.
    pub(crate) fn device_names(&self) -> BTreeMap<u8, String> {
        let devices = self.bumps.iter().filter(|bump| bump.device.is_some());
        devices
            .map(|bump| (bump.id.get(), bump.name.clone()))
            .collect()
    }

    /// What a peer's daemon says, in our numbers of the bumps.
    pub(crate) fn in_our_numbers(&self, peer: usize, body: Body) -> Body {
        let mut state = self.state.borrow_mut();
        let known = &mut state.peers[peer].devices;
        match body {
            Body::Want {
                sequence,
                bumps,
                devices,
            } => {
                let named = devices
                    .iter()
                    .map(|(number, name)| (*number, name.as_str()));
                *known = translation(&self.bumps, named);
                let wanted = (1..16).filter(|number| bumps & 1 << number != 0);
                let ours = wanted.map(|number| translated(known, number));
                Body::Want {
                    sequence,
                    bumps: ours.fold(0, |all, number| all | 1 << number),
                    devices,
                }
            }
            Body::Switch {
                bump,
                explicit,
                ready,
                conns,
            } => Body::Switch {
                bump: translated(known, bump),
                explicit,
                ready,
                conns,
            },
            Body::Confirm { bump, conns } => Body::Confirm {
                bump: translated(known, bump),
                conns,
            },
            Body::Answer(outcomes) => {
                let ours = |(outcome, value)| match (outcome, u8::try_from(value)) {
                    (Outcome::OwnRule, Ok(bump)) => (outcome, translated(known, bump).into()),
                    _ => (outcome, value),
                };
                Body::Answer(outcomes.into_iter().map(ours).collect())
            }
        }
    }

    /// The bumps that connections can be put on.
    pub(crate) fn carried(&self) -> &[Carried] {
        &self.bumps
    }

    /// The bump of this number.
    pub(crate) fn bump(&self, number: u8) -> Option<&Carried> {
        self.bumps.iter().find(|bump| bump.id.get() == number)
    }

    /// Of a bump that the node carries, how it splits, if it does; none if the node does not carry it.
    pub(crate) fn split_of(&self, number: u8) -> Option<Option<(u8, u8)>> {
        let name = &self.bump(number)?.name;
        let bump = self.config.bump(name)?;
        (bump.kind != BumpKind::Device).then_some(bump.shares)
    }

    /// The name of a bump by its number; 0 is "plain".
    pub(crate) fn bump_name(&self, number: u8) -> &str {
        match self.bump(number) {
            Some(bump) => &bump.name,
            None if number == 0 => "plain",
            None => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_numbered_from_8_in_the_files_order() {
        let device =
            |i| format!("[[bump]]\nname = \"b{i}\"\nkind = \"device\"\ndevice = \"tun{i}\"\n");
        let path = "[[path]]\nname = \"a\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n";
        let file = path.to_owned() + &(0..7).map(device).collect::<String>();
        let config = dibs_config::parse("dibs.toml", &file).unwrap();
        let numbers: Vec<_> = numbered(&config)
            .into_iter()
            .map(|bump| (bump.name, bump.id.get()))
            .collect();
        let known = [
            ("scramble", 1),
            ("share", 2),
            ("seal", 3),
            ("b0", 8),
            ("b6", 14),
        ];
        assert_eq!(numbers.len(), 10);
        for (name, number) in known {
            assert!(numbers.contains(&(name.to_owned(), number)), "{numbers:?}");
        }
        // Another host, or this one before, has them in another order, and one that is not here.
        let elsewhere = [(8, "b6"), (9, "other"), (10, "seal"), (3, "b1"), (14, "b0")];
        let devices = translation(&numbered(&config), elsewhere);
        assert_eq!(devices, [(8, 14), (14, 8)].into());
        let ours = [0, 1, 3, 8, 9, 10, 14, 15].map(|number| translated(&devices, number));
        assert_eq!(ours, [0, 1, 3, 14, NOBODYS, NOBODYS, 8, NOBODYS]);
        assert_eq!(carried(&config).len(), 9, "there is one path: no share");
    }
}
