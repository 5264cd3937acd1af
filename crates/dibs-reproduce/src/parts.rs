//! The parts of the report.

mod captures;
mod codec;
mod database;
mod files;
mod hinted;
mod read;
mod scene;
mod sum;
mod switched;

use std::path::PathBuf;

use anyhow::Result;
use dibs_lab::dibs::Programs;

use crate::finding::Finding;

/// An experiment.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// For the command line, and for files.
    pub name: &'static str,
    /// Subject of the part.
    pub title: &'static str,
    /// Whose tables and figures.
    pub source: &'static str,
    /// Runs it.
    pub run: fn(&Stage) -> Result<Finding>,
}

/// Setting that every part needs.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Directory of the programs, if not installed.
    pub programs: PathBuf,
    /// True if all is to be as short as it can be.
    pub quick: bool,
}

impl Stage {
    fn programs(&self) -> Result<Programs> {
        Programs::beside(&self.programs)
    }

    /// One or the other, by how long it may take.
    fn pick<T>(&self, whole: T, quick: T) -> T {
        if self.quick { quick } else { whole }
    }
}

/// All of them, in the order of the report.
pub const PARTS: [Part; 8] = [
    Part {
        name: "codec",
        title: "A message of 1280 bytes, there and back",
        source: "Kato et al. 2017 and 2018, Table II",
        run: codec::run,
    },
    Part {
        name: "captures",
        title: "What stands in a datagram on the untrusted path",
        source: "Kato et al. 2019, Fig. 13 to 17",
        run: captures::run,
    },
    Part {
        name: "files",
        title: "Files over Ethernet and WLAN",
        source: "Kato et al. 2019, Fig. 18",
        run: files::run,
    },
    Part {
        name: "read",
        title: "What an eavesdropper on the untrusted path recovers",
        source: "In no paper; \"not every, not any\" of Kato et al. put to the test",
        run: read::run,
    },
    Part {
        name: "dibs",
        title: "One stream, moved from bump to bump",
        source: "Pohly et al. 2015, Table I and Fig. 3",
        run: switched::run,
    },
    Part {
        name: "hint",
        title: "The user prefers a path",
        source: "Liyanage et al. 2021, Fig. 6 to 12, and the recovery times",
        run: hinted::run,
    },
    Part {
        name: "sum",
        title: "Two unequal paths add up in a stream that runs",
        source: "In no paper: what the two lines of work give together",
        run: sum::run,
    },
    Part {
        name: "database",
        title: "A database whose connections move each second",
        source: "In no paper; the transparency and agility of Pohly et al. 2015 put to the test",
        run: database::run,
    },
];
