//! The bumps that this daemon carries, and their numbers in marks and between daemons.

use dibs_config::{BumpConfig, BumpKind, CARRIED, Config};
use dibs_core::bump::{self, Bump, Padding, Scheme};
use dibs_policy::BumpId;

use crate::daemon::Daemon;

/// Devices are numbered from here, in the file's order.
const FIRST_DEVICE: u8 = 8;

/// A bump that connections can be put on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// For the user.
    pub name: String,
    /// In marks and on the wire.
    pub id: BumpId,
    /// What it does.
    pub kind: BumpKind,
}

/// The bumps of a configuration that this version carries.
pub fn carried(config: &Config) -> Vec<Carried> {
    let mut bumps = numbered(config);
    let one_path = |bump: &Carried| bump.kind == BumpKind::Share && config.paths.len() < 2;
    bumps.retain(|bump| CARRIED.contains(&bump.kind) && !one_path(bump));
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

/// All bumps of a configuration. What this version does not carry has its number all the same.
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
        }
    });
    bumps.collect()
}

impl Daemon {
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
        assert!(
            carried(&config)
                .iter()
                .all(|bump| CARRIED.contains(&bump.kind))
        );
    }
}
