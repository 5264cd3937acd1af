//! The report as one page of HTML that needs nothing else.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::finding::{Block, Comparison, Finding, Outcome, Record, Verdict};
use crate::parts::Part;

const STYLE: &str = include_str!("style.css");

/// The page: what came of each part, or that there is nothing of it yet. `about` says where and when.
pub fn page(about: &str, parts: &[(&Part, Option<Record>)]) -> String {
    let is_quick = { parts.iter() }.any(|(_, record)| record.as_ref().is_some_and(|r| r.quick));
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "dibs: the papers on this machine" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "The papers on this machine" }
                p { (about) }
                @if is_quick {
                    p.note {
                        "Shortened runs (" code { "--quick" } "): the figures are less steady than those of whole ones."
                    }
                }
                h2 { "In short" }
                div.wide {
                    table.summary {
                        thead { tr { th { "What" } th { "The paper" } th { "Here" } th { "Verdict" } } }
                        tbody { @for (part, record) in parts { (summary(part, record.as_ref())) } }
                    }
                }
                @for (part, record) in parts { (section(part, record.as_ref())) }
            }
        }
    };
    page.into_string()
}

/// Every comparison of a part, as rows of one table.
fn summary(part: &Part, record: Option<&Record>) -> Markup {
    html! {
        tr.part { th colspan="4" { a href={ "#" (part.name) } { (part.title) } } }
        @match record.map(|record| &record.outcome) {
            None => tr { td colspan="4" { "not run yet" } },
            Some(Outcome::Failed(reason)) => tr.failed { td colspan="4" { "failed: " (reason) } },
            Some(Outcome::Done(finding)) => { @for one in &finding.comparisons { (row(one)) } },
        }
    }
}

fn row(one: &Comparison) -> Markup {
    let (word, why) = one.verdict.words();
    let class = match one.verdict {
        Verdict::Agrees => "agrees",
        Verdict::Differs(_) => "differs",
        Verdict::Incomparable(_) | Verdict::New => "other",
    };
    html! {
        tr {
            td { (one.of) } td { (one.paper) } td { (one.ours) }
            td { span class=(class) { (word) } @if let Some(why) = why { br; small { (why) } } }
        }
    }
}

fn section(part: &Part, record: Option<&Record>) -> Markup {
    html! {
        section id=(part.name) {
            h2 { (part.title) }
            p.source { (part.source) }
            @match record.map(|record| (&record.outcome, record)) {
                None => p { "Not run yet." },
                Some((Outcome::Failed(reason), _)) => p.failed { "Failed: " (reason) },
                Some((Outcome::Done(finding), record)) => {
                    (content(finding))
                    p.source {
                        "Run at " (record.at) " in " (format!("{:.0}", record.seconds)) " s by "
                        code { "cargo xtask reproduce " (part.name) @if record.quick { " --quick" } }
                        "; all figures in " code { (part.name) ".json" } "."
                    }
                },
            }
        }
    }
}

fn content(finding: &Finding) -> Markup {
    html! {
        p { (finding.setup) }
        @for block in &finding.blocks {
            @match block {
                Block::Text { text } => p { (text) },
                Block::Figure { caption, svg, .. } => figure {
                    (PreEscaped(svg)) figcaption { (caption) }
                },
                Block::Capture { caption, text } => figure { pre { (text) } figcaption { (caption) } },
                Block::Table { caption, columns, rows } => div.wide {
                    table.figures {
                        caption { (caption) }
                        thead { tr { @for name in columns { th { (name) } } } }
                        tbody { @for row in rows { tr { @for cell in row { td { (cell) } } } } }
                    }
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;
    use crate::parts::Stage;

    const PARTS: [Part; 3] = [
        Part {
            name: "good",
            title: "Good <things>",
            source: "A paper",
            run: good,
        },
        Part {
            name: "bad",
            title: "Bad things",
            source: "A paper",
            run: |_| bail!("no \"link\" & no host"),
        },
        Part {
            name: "later",
            title: "Later things",
            source: "A paper",
            run: good,
        },
    ];

    fn good(_: &Stage) -> anyhow::Result<Finding> {
        let mut finding = Finding {
            setup: "Two hosts.".to_owned(),
            ..Finding::default()
        };
        finding.compare("Fig. 1", ["about 90", "91"], Verdict::Agrees);
        let why = Verdict::Differs("another way".to_owned());
        finding.compare("Fig. 2", ["75", "20"], why);
        finding.table(
            "Rates",
            &["bump", "Mbit/s"],
            vec![vec!["seal".to_owned(), "91".to_owned()]],
        );
        finding.figure("one", "A picture", "<svg></svg>\n".to_owned());
        finding.capture("What he sees", "<?0<".to_owned());
        Ok(finding)
    }

    fn record(part: &Part, outcome: Outcome) -> Record {
        Record {
            name: part.name.to_owned(),
            at: "2026-01-01T00:00:00Z".to_owned(),
            seconds: 1.0,
            quick: true,
            outcome,
        }
    }

    #[test]
    fn what_was_done_what_failed_and_what_is_to_come_show() {
        let stage = Stage {
            programs: "/nowhere".into(),
            quick: true,
        };
        let done = match (PARTS[0].run)(&stage) {
            Ok(finding) => Outcome::Done(finding),
            Err(error) => panic!("{error}"),
        };
        let failed = Outcome::Failed("no \"link\" & no host".to_owned());
        let parts = [
            (&PARTS[0], Some(record(&PARTS[0], done))),
            (&PARTS[1], Some(record(&PARTS[1], failed))),
            (&PARTS[2], None),
        ];
        let page = page("Linux 6.1", &parts);
        for part in &PARTS {
            assert_eq!(
                page.matches(&format!("<section id=\"{}\">", part.name))
                    .count(),
                1
            );
            assert!(page.contains(&format!("<a href=\"#{}\">", part.name)));
        }
        for piece in [
            "<h2>Good &lt;things&gt;</h2>",
            "<td>Fig. 1</td><td>about 90</td><td>91</td><td><span class=\"agrees\">agrees</span></td>",
            "<span class=\"differs\">differs</span><br><small>another way</small>",
            "<tr class=\"failed\"><td colspan=\"4\">failed: no &quot;link&quot; &amp; no host</td></tr>",
            "<p class=\"failed\">Failed: no &quot;link&quot;",
            "<td colspan=\"4\">not run yet</td>",
            "<td>seal</td><td>91</td>",
            "<svg></svg>",
            "<pre>&lt;?0&lt;</pre>",
            "reproduce good --quick</code>",
        ] {
            assert!(page.contains(piece), "{piece}: {page}");
        }
        for outside in ["http://", "https://", "src=", "<script", "<link"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }
}
