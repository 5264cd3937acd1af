//! The bumps that this daemon carries, and their numbers in marks and between daemons.

use std::collections::BTreeMap;

use dibs_config::{BuiltIn, BumpConfig, Config};
use dibs_core::bump::{self, Bump, MAX_NUMBER, Padding, Scheme};
use dibs_settings::BumpId;
use dibs_switch::messages::{Body, Outcome};

/// Devices are numbered from here, in the file's order.
pub(crate) const FIRST_DEVICE: u8 = 8;

/// A number that no bump has.
pub(crate) const NOBODYS: u8 = MAX_NUMBER + 1;

const _: () = assert!(NOBODYS < FIRST_DEVICE);

/// A bump that connections can be put on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// For the user.
    pub name: String,
    /// In marks and on the wire.
    pub id: BumpId,
    /// Of another program's device, its name.
    pub device: Option<String>,
    /// Of one that splits: the shares that it needs, and all.
    pub shares: Option<(u8, u8)>,
    /// What whoever uses it should hear.
    pub warning: Option<&'static str>,
}

/// The bumps of a configuration that connections can be put on.
pub fn carried(config: &Config) -> Vec<Carried> {
    let mut devices = FIRST_DEVICE..;
    let bumps = config.bumps.iter().map(|bump| {
        let built_in = bump.built_in();
        let number = match built_in {
            Some(bump) => of_core(bump).number,
            None => devices.next().expect("there are few devices"),
        };
        let carried = Carried {
            name: bump.name.clone(),
            id: BumpId::new(number).expect("the configuration bounds the devices"),
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

/// The same of many, bit n for number n.
pub(crate) fn translated_mask(devices: &BTreeMap<u8, u8>, bumps: u16) -> u16 {
    let named = (1..16).filter(|number| bumps & 1 << number != 0);
    let ours = named.map(|number| translated(devices, number));
    ours.fold(0, |all, number| all | 1 << number)
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

    /// The one of this number.
    pub(crate) fn get(&self, number: u8) -> Option<&Carried> {
        self.0.iter().find(|bump| bump.id.get() == number)
    }

    /// Their numbers, bit n for number n.
    pub(crate) fn mask(&self) -> u16 {
        let numbers = self.0.iter().map(|bump| bump.id.get());
        numbers.fold(0, |all, number| all | 1 << number)
    }

    /// The name of a bump by its number; 0 is "plain".
    pub(crate) fn name_of(&self, number: u8) -> &str {
        match self.get(number) {
            Some(bump) => &bump.name,
            None if number == 0 => "plain",
            None => "unknown",
        }
    }

    /// The device of a bump that is another program's.
    pub(crate) fn device_of(&self, number: u8) -> Option<&str> {
        self.get(number)?.device.as_deref()
    }

    /// Whether what is on this bump (0: plain) goes by the kernel alone, and not by the data path.
    pub(crate) fn is_outside(&self, number: u8) -> bool {
        number == 0 || self.device_of(number).is_some()
    }

    /// Of a bump that the node carries, how it splits, if it does; none if the node does not carry it.
    pub(crate) fn split_of(&self, number: u8) -> Option<Option<(u8, u8)>> {
        let bump = self.get(number).filter(|bump| bump.device.is_none())?;
        Some(bump.shares)
    }

    /// The bumps that are devices, by number.
    pub(crate) fn device_names(&self) -> BTreeMap<u8, String> {
        let devices = self.0.iter().filter(|bump| bump.device.is_some());
        devices
            .map(|bump| (bump.id.get(), bump.name.clone()))
            .collect()
    }

    /// What a peer's daemon says, in our numbers of the bumps; `devices` has what is known of its numbers.
    pub(crate) fn in_our_numbers(&self, devices: &mut BTreeMap<u8, u8>, body: Body) -> Body {
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
                switch.bump = translated(devices, switch.bump);
                Body::Switch { switch, conns }
            }
            Body::Confirm { bump, conns } => Body::Confirm {
                bump: translated(devices, bump),
                conns,
            },
            Body::Answer(outcomes) => {
                let ours = |(outcome, value)| match (outcome, u8::try_from(value)) {
                    (Outcome::OwnRule, Ok(bump)) => (outcome, translated(devices, bump).into()),
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
    use crate::driver::MAX_PATHS;

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
        let elsewhere = [(8, "b6"), (9, "other"), (10, "seal"), (3, "b1"), (14, "b0")];
        let devices = translation(&bumps, elsewhere);
        assert_eq!(devices, [(8, 14), (14, 8)].into());
        let ours = [0, 1, 3, 8, 9, 10, 14, 15].map(|number| translated(&devices, number));
        assert_eq!(ours, [0, 1, 3, 14, NOBODYS, NOBODYS, 8, NOBODYS]);
    }

    #[test]
    fn each_that_is_built_in_is_carried_whatever_the_number_of_paths() {
        for paths in 1..=MAX_PATHS {
            // Panics where shares do not fit.
            let all = BuiltIn::usual(paths).map(of_core);
            let numbers = BTreeSet::from_iter(all.iter().map(|bump| bump.number));
            assert_eq!(numbers.len(), all.len(), "each has a number of its own");
            assert!(
                numbers
                    .iter()
                    .all(|number| (1..=MAX_NUMBER).contains(number))
            );
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
            assert_eq!(of_core(bump).number, carried.id.get());
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
