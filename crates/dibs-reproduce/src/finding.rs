//! What came of an experiment: as the report shows it, and as it is kept.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Result of an experiment that ran.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Finding {
    /// Hosts, links and programs.
    pub setup: String,
    /// The paper beside ours.
    pub comparisons: Vec<Comparison>,
    /// Blocks to look at, in this order.
    pub blocks: Vec<Block>,
    /// All that was measured.
    pub data: serde_json::Value,
}

/// A table or figure of a paper, or a row of one, beside ours.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Comparison {
    /// Table or figure that is compared.
    pub of: String,
    /// The paper's numbers.
    pub paper: String,
    /// Ours.
    pub ours: String,
    /// How they compare.
    pub verdict: Verdict,
}

/// One line for a terminal.
impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            of, paper, ours, ..
        } = self;
        let (word, why) = self.verdict.words();
        write!(f, "{of}: the paper: {paper}; here: {ours}; {word}")?;
        why.map_or(Ok(()), |why| write!(f, " ({why})"))
    }
}

/// How ours compares with the paper's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "is", content = "why")]
pub enum Verdict {
    /// It shows what the paper says.
    Agrees,
    /// It does not.
    Differs(String),
    /// The numbers mean other things.
    Incomparable(String),
    /// No paper has it.
    New,
}

/// Something to look at.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "is")]
pub enum Block {
    /// A sentence or more.
    Text {
        /// Without markup.
        text: String,
    },
    /// Figures. The first column names the rows.
    Table {
        /// What it shows.
        caption: String,
        /// Names of the columns.
        columns: Vec<String>,
        /// As many cells each.
        rows: Vec<Vec<String>>,
    },
    /// A picture.
    Figure {
        /// The file's name, without `.svg`.
        name: String,
        /// What it shows.
        caption: String,
        /// The picture itself.
        svg: String,
    },
    /// Bytes as somebody saw them.
    Capture {
        /// Whose, and where.
        caption: String,
        /// Lines of a terminal.
        text: String,
    },
}

/// Record that is kept of a part.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The part's name.
    pub name: String,
    /// When it began, UTC.
    pub at: String,
    /// How long it took.
    pub seconds: f64,
    /// True if it was shortened.
    pub quick: bool,
    /// Outcome of the part.
    pub outcome: Outcome,
}

/// Outcome of a part.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It ran.
    Done(Finding),
    /// It did not; with the reason.
    Failed(String),
}

impl Finding {
    /// Puts a comparison behind those that are there.
    pub(crate) fn compare(&mut self, of: &str, [paper, ours]: [&str; 2], verdict: Verdict) {
        self.comparisons.push(Comparison {
            of: of.to_owned(),
            paper: paper.to_owned(),
            ours: ours.to_owned(),
            verdict,
        });
    }

    /// The same for a table.
    pub(crate) fn table(&mut self, caption: &str, columns: &[&str], rows: Vec<Vec<String>>) {
        self.blocks.push(Block::Table {
            caption: caption.to_owned(),
            columns: columns.iter().map(|&name| name.to_owned()).collect(),
            rows,
        });
    }

    /// The same for a picture.
    pub(crate) fn figure(&mut self, name: &str, caption: &str, svg: String) {
        self.blocks.push(Block::Figure {
            name: name.to_owned(),
            caption: caption.to_owned(),
            svg,
        });
    }

    /// The same for a capture.
    pub(crate) fn capture(&mut self, caption: &str, text: String) {
        self.blocks.push(Block::Capture {
            caption: caption.to_owned(),
            text,
        });
    }

    /// The same for a sentence.
    pub(crate) fn say(&mut self, text: &str) {
        self.blocks.push(Block::Text {
            text: text.to_owned(),
        });
    }
}

impl Verdict {
    /// For people, and why.
    pub(crate) fn words(&self) -> (&'static str, Option<&str>) {
        match self {
            Self::Agrees => ("agrees", None),
            Self::Differs(why) => ("differs", Some(why)),
            Self::Incomparable(why) => ("not comparable", Some(why)),
            Self::New => ("in no paper", None),
        }
    }

    /// [`Agrees`](Self::Agrees), or else what is different.
    pub(crate) fn agrees_if(agrees: bool, otherwise: &str) -> Self {
        match agrees {
            true => Self::Agrees,
            false => Self::Differs(otherwise.to_owned()),
        }
    }
}
