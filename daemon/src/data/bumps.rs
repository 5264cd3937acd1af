//! The bumps that this daemon carries, and their numbers in marks and between daemons.

use std::collections::BTreeMap;

use dibs_config::{BuiltIn, BumpConfig, Config};
use dibs_core::bump::{self, Bump, MAX_NUMBER, Padding, Scheme};
use dibs_policy::MarkLayout;
use dibs_settings::BumpId;
use dibs_switch::messages::{Body, Outcome};

/// Devices are numbered from here, in the file's order.
pub(crate) const FIRST_DEVICE: u8 = 8;

/// A number that no bump has.
pub(crate) const NOBODYS: BumpId = BumpId::new(MAX_NUMBER + 1).expect("there are few of ours");

const _: () = assert!(NOBODYS.get() < FIRST_DEVICE);

/// Field in the marks: the lowest six bits of the configured run.
pub fn marks(config: &Config) -> MarkLayout {
    let mask = config.daemon.mark_mask;
    MarkLayout::new(0x3f << mask.trailing_zeros()).expect("the run has six bits at least")
}

/// A bump that connections can be put on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// For the user.
    pub name: String,
    /// In marks and on the wire.
    pub id: BumpId,
    /// Name of another program's device, if it is one.
    pub device: Option<String>,
    /// Shares of one that splits: those that it needs, and all.
    pub shares: Option<(u8, u8)>,
    /// Warning for whoever uses it.
    pub warning: Option<&'static str>,
}

/// The bumps of a configuration that connections can be put on.
pub fn carried(config: &Config) -> Vec<Carried> {
    let mut devices = FIRST_DEVICE..;
    let bumps = config.bumps.iter().map(|bump| {
        let built_in = bump.built_in();
        let id = match built_in {
            Some(bump) => Some(of_core(bump).number),
            None => devices.next().and_then(BumpId::new),
        };
        let carried = Carried {
            name: bump.name.clone(),
            id: id.expect("the configuration bounds the devices"),
            device: bump.device().map(str::to_owned),
            shares: built_in.and_then(BuiltIn::shares),
            warning: built_in.and_then(BuiltIn::warning),
        };
        config.lack(bump).is_none().then_some(carried)
    });
    bumps.flatten().collect()
}

/// The bumps that the node is told of: all but devices.
pub fn for_node(config: &Config) -> Vec<Bump> {
    let bumps = config.bumps.iter();
    let carried = bumps.filter(|bump| config.lack(bump).is_none());
    let built_in = carried.filter_map(BumpConfig::built_in);
    built_in.map(of_core).collect()
}

fn of_core(bump: BuiltIn) -> Bump {
    match bump {
        BuiltIn::Scramble => bump::scramble(),
        BuiltIn::Share { needed, shares } => {
            let scheme = Scheme::new(needed, shares);
            bump::share(scheme.expect("the configuration was checked: it is a scheme"))
        }
        BuiltIn::Seal { padding: true } => bump::seal(Padding::Buckets),
        BuiltIn::Seal { padding: false } => bump::seal(Padding::None),
    }
}

/// Numbers of bumps as somebody else has them, or we had them ourselves: for each that is a device, the
/// number that the bump of its name has here.
pub(crate) fn translation<'a>(
    bumps: &[Carried],
    devices: impl IntoIterator<Item = (BumpId, &'a str)>,
) -> BTreeMap<BumpId, BumpId> {
    let own = |name: &str| {
        let mut devices = bumps.iter().filter(|bump| bump.device.is_some());
        Some(devices.find(|bump| bump.name == name)?.id)
    };
    let known = devices
        .into_iter()
        .filter(|(number, _)| number.get() >= FIRST_DEVICE);
    known
        .filter_map(|(number, name)| Some((number, own(name)?)))
        .collect()
}

/// Our number of a bump that has this one elsewhere; [`NOBODYS`] if it has none here.
pub(crate) fn translated(devices: &BTreeMap<BumpId, BumpId>, number: BumpId) -> BumpId {
    match number.get() {
        FIRST_DEVICE.. => devices.get(&number).copied().unwrap_or(NOBODYS),
        _ => number,
    }
}

/// The same of many, bit n for number n.
pub(crate) fn translated_mask(devices: &BTreeMap<BumpId, BumpId>, bumps: u16) -> u16 {
    mask(of_mask(bumps).map(|number| translated(devices, number)))
}

/// The bumps of which this has bits, bit n for number n.
pub(crate) fn of_mask(bumps: u16) -> impl Iterator<Item = BumpId> {
    BumpId::all().filter(move |bump| bumps & 1 << bump.get() != 0)
}

fn mask(bumps: impl Iterator<Item = BumpId>) -> u16 {
    bumps.fold(0, |all, bump| all | 1 << bump.get())
}

/// The bumps that this daemon carries. They do not change while it runs.
pub(crate) struct Bumps(Vec<Carried>);

impl Bumps {
    /// Those of a configuration.
    pub(crate) fn of(config: &Config) -> Self {
        Self(carried(config))
    }

    /// All that connections can be put on.
    pub(crate) fn all(&self) -> &[Carried] {
        &self.0
    }

    /// The one of this number, if it is carried.
    pub(crate) fn get(&self, on: impl Into<Option<BumpId>>) -> Option<&Carried> {
        let id = on.into()?;
        self.0.iter().find(|bump| bump.id == id)
    }

    /// The name of a bump, or of none: "plain".
    pub(crate) fn name_of(&self, on: impl Into<Option<BumpId>>) -> &str {
        let Some(id) = on.into() else {
            return "plain";
        };
        self.get(id).map_or("unknown", |bump| &bump.name)
    }

    /// The device of a bump that is another program's.
    pub(crate) fn device_of(&self, on: impl Into<Option<BumpId>>) -> Option<&str> {
        self.get(on)?.device.as_deref()
    }

    /// This bump, if what is on it goes by the data path, and not by the kernel alone.
    pub(crate) fn inside(&self, on: impl Into<Option<BumpId>>) -> Option<BumpId> {
        on.into().filter(|id| self.device_of(*id).is_none())
    }

    /// Whether what is on this bump, or on none, goes by the kernel alone, and not by the data path.
    pub(crate) fn is_outside(&self, on: impl Into<Option<BumpId>>) -> bool {
        self.inside(on).is_none()
    }

    /// Of a bump that the node carries, how it splits, if it does; none if the node does not carry it.
    pub(crate) fn split_of(&self, id: BumpId) -> Option<Option<(u8, u8)>> {
        let bump = self.get(id).filter(|bump| bump.device.is_none())?;
        Some(bump.shares)
    }

    /// The bumps that are devices, by number.
    pub(crate) fn device_names(&self) -> BTreeMap<BumpId, String> {
        let devices = self.0.iter().filter(|bump| bump.device.is_some());
        devices.map(|bump| (bump.id, bump.name.clone())).collect()
    }

    /// What a peer's daemon says, in our numbers of the bumps; `devices` has what is known of its numbers.
    pub(crate) fn in_our_numbers(
        &self,
        devices: &mut BTreeMap<BumpId, BumpId>,
        body: Body,
    ) -> Body {
        match body {
            Body::Want {
                sequence,
                bumps,
                devices: named,
            } => {
                let names = named.iter().map(|(number, name)| (*number, name.as_str()));
                *devices = translation(&self.0, names);
                Body::Want {
                    sequence,
                    bumps: translated_mask(devices, bumps),
                    devices: named,
                }
            }
            Body::Switch { mut switch, conns } => {
                switch.bump = switch.bump.map(|bump| translated(devices, bump));
                Body::Switch { switch, conns }
            }
            Body::Confirm { bump, conns } => Body::Confirm {
                bump: translated(devices, bump),
                conns,
            },
            // A device of another program is nobody's whose calls a daemon hears.
            other @ (Body::Silent { .. } | Body::Measure { .. }) => other,
            Body::Knock(conns) => Body::Knock(conns),
            Body::Match(conns) => Body::Match(conns),
            Body::Seek(ports) => Body::Seek(ports),
            Body::Hide(conns) => Body::Hide(conns),
            Body::Answer(outcomes) => {
                let number = |value| BumpId::new(u8::try_from(value).ok()?);
                let ours = |(outcome, value)| match (outcome, number(value)) {
                    (Outcome::OwnRule, Some(bump)) => {
                        (outcome, translated(devices, bump).get().into())
                    }
                    _ => (outcome, value),
                };
                Body::Answer(outcomes.into_iter().map(ours).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use dibs_core::bump::{SEAL, SHARE};

    use super::*;
    use crate::data::thread::MAX_PATHS;

    /// The configuration of a host with so many paths.
    fn config(paths: usize, rest: &str) -> Config {
        let path =
            |i| format!("[[path]]\nname = \"p{i}\"\ninterface = \"eth{i}\"\ntrust = \"trusted\"\n");
        let file = (0..paths).map(path).collect::<String>() + rest;
        dibs_config::parse("dibs.toml", &file).unwrap()
    }

    #[test]
    fn devices_are_numbered_from_8_in_the_files_order() {
        let device =
            |i| format!("[[bump]]\nname = \"b{i}\"\nkind = \"device\"\ndevice = \"tun{i}\"\n");
        let bumps = carried(&config(2, &(0..7).map(device).collect::<String>()));
        let numbers: Vec<_> = { bumps.iter() }
            .map(|bump| (bump.name.as_str(), bump.id.get()))
            .collect();
        assert_eq!(numbers.len(), BuiltIn::usual(0).len() + 7);
        for known in [
            ("scramble", 1),
            ("share", 2),
            ("seal", 3),
            ("b0", 8),
            ("b6", 14),
        ] {
            assert!(numbers.contains(&known), "{numbers:?}");
        }
        // Another host, or this one before, has them in another order, and one that is not here.
        let id = |number| BumpId::new(number).expect("a number of a bump");
        let elsewhere = [(8, "b6"), (9, "other"), (10, "seal"), (3, "b1"), (14, "b0")];
        let devices = translation(&bumps, elsewhere.map(|(number, name)| (id(number), name)));
        assert_eq!(devices, [(id(8), id(14)), (id(14), id(8))].into());
        let ours = [1, 3, 8, 9, 10, 13, 14].map(|number| translated(&devices, id(number)));
        let known = [1, 3, 14].map(id);
        assert_eq!(ours[..3], known);
        assert_eq!(ours[3..], [NOBODYS, NOBODYS, NOBODYS, id(8)]);
    }

    #[test]
    fn each_that_is_built_in_is_carried_whatever_the_number_of_paths() {
        for paths in 1..=MAX_PATHS {
            // Panics where shares do not fit.
            let all: Vec<_> = BuiltIn::usual(paths).into_iter().map(of_core).collect();
            let numbers = BTreeSet::from_iter(all.iter().map(|bump| bump.number));
            assert_eq!(numbers.len(), all.len(), "each has a number of its own");
            assert!(numbers.iter().all(|number| number.get() <= MAX_NUMBER));
        }
        let config = config(MAX_PATHS, "");
        let (carried, for_node) = (carried(&config), for_node(&config));
        let all = BuiltIn::usual(MAX_PATHS);
        assert_eq!((carried.len(), for_node.len()), (all.len(), all.len()));
        for (bump, carried) in all.into_iter().zip(&carried) {
            assert_eq!(
                (bump.name(), bump.warning()),
                (&*carried.name, carried.warning)
            );
            assert_eq!(of_core(bump).number, carried.id);
        }
    }

    #[test]
    fn what_needs_more_paths_is_not_carried() {
        let config = config(1, "");
        let names = carried(&config).into_iter().map(|bump| bump.name);
        let names: Vec<_> = names.collect();
        assert!(names.contains(&"seal".to_owned()) && !names.contains(&"share".to_owned()));
        let numbers = for_node(&config).into_iter().map(|bump| bump.number);
        let numbers: Vec<_> = numbers.collect();
        assert!(numbers.contains(&SEAL) && !numbers.contains(&SHARE));
    }
}
