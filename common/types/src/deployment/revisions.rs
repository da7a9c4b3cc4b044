//! The revisions of a KryptonDeployment's release, from which the hub derives `status.history`.

use std::cmp::Reverse;

use krypton_crds::tenant::{CHART_TEXT_MAX, HISTORY_MAX};

use crate::names::LABEL_MAX;
use crate::text::truncate;

/// The newest revisions of a release, at most [`HISTORY_MAX`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedRevisions {
    program: &'static str,
    newest_first: Vec<ReportedRevision>,
}

/// A revision, from the labels of its Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReportedRevision {
    pub revision: u32,
    /// Time of creation in seconds since 1970, by the clock of the member's API server.
    pub created: Option<i64>,
    /// Value of Helm's label `status`.
    pub status: String,
    pub fingerprint: Option<String>,
    pub owner_uid: Option<String>,
    pub run: Option<String>,
    pub rolled_back_by: Option<u32>,
    /// `None` if the reporter does not know the chart.
    pub chart: Option<ReportedChart>,
}

/// Chart of a revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReportedChart {
    pub name: String,
    pub version: String,
    /// Whether the reporter has read it in the revision. Otherwise, it follows from the fingerprint.
    pub is_read: bool,
}

impl ReportedRevisions {
    /// Keeps the newest revisions, with every text cut to its limit. Drops a chart with characters that no chart has.
    /// `program` is the reporter's field manager.
    #[must_use]
    pub fn new(program: &'static str, mut revisions: Vec<ReportedRevision>) -> Self {
        revisions.sort_by_key(|revision| Reverse(revision.revision));
        revisions.dedup_by_key(|revision| revision.revision);
        revisions.truncate(HISTORY_MAX);
        for revision in &mut revisions {
            revision.trim();
        }
        Self {
            program,
            newest_first: revisions,
        }
    }

    /// Returns the field manager of the program that reports them.
    pub fn program(&self) -> &'static str {
        self.program
    }

    pub fn newest_first(&self) -> &[ReportedRevision] {
        &self.newest_first
    }

    /// Returns the size of all texts, in bytes.
    pub fn text_size(&self) -> usize {
        let sizes = self.newest_first.iter().map(|revision| {
            let labels = [&revision.fingerprint, &revision.owner_uid, &revision.run];
            let chart = revision.chart.iter();
            let chart = chart.flat_map(|chart| [&chart.name, &chart.version]);
            let texts = labels.into_iter().flatten().chain(chart);
            revision.status.len() + texts.map(String::len).sum::<usize>()
        });
        sizes.sum()
    }

    /// Adds the charts of an earlier report, unless this one has read them again.
    #[must_use]
    pub fn with_charts_of(mut self, earlier: &Self) -> Self {
        for revision in &mut self.newest_first {
            let mut others = earlier.newest_first.iter();
            let same = others.find(|other| {
                (other.revision, other.created) == (revision.revision, revision.created)
            });
            let known = same.and_then(|same| same.chart.as_ref());
            if let Some(known) = known.filter(|known| {
                let chart = revision.chart.as_ref();
                chart.is_none_or(|chart| known.is_read && !chart.is_read)
            }) {
                revision.chart = Some(known.clone());
            }
        }
        self
    }
}

impl ReportedRevision {
    fn trim(&mut self) {
        let labels = [&mut self.fingerprint, &mut self.owner_uid, &mut self.run];
        for label in labels.into_iter().flatten().chain([&mut self.status]) {
            truncate(label, LABEL_MAX);
        }
        self.chart = self.chart.take().filter(ReportedChart::has_legal_texts);
        if let Some(chart) = &mut self.chart {
            truncate(&mut chart.name, CHART_TEXT_MAX);
            truncate(&mut chart.version, CHART_TEXT_MAX);
        }
    }
}

impl ReportedChart {
    /// Whether both texts have only the characters of a chart's name and version. A member can write any text into its
    /// release Secrets, and the status of the home cluster reaches terminals.
    fn has_legal_texts(&self) -> bool {
        let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.+".contains(&byte);
        let mut texts = [&self.name, &self.version].into_iter();
        texts.all(|text| !text.is_empty() && text.bytes().all(is_legal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn revision(revision: u32, chart: Option<(&str, bool)>) -> ReportedRevision {
        let chart = chart.map(|(version, is_read)| ReportedChart {
            name: "echo".to_owned(),
            version: version.to_owned(),
            is_read,
        });
        ReportedRevision {
            revision,
            created: Some(i64::from(revision)),
            chart,
            ..ReportedRevision::default()
        }
    }

    #[test]
    fn report_of_revisions_is_bounded() {
        let long = || Some("ä".repeat(1000));
        let all = (0..100).chain(0..100).map(|number| ReportedRevision {
            revision: number,
            created: None,
            status: "s".repeat(1000),
            fingerprint: long(),
            owner_uid: long(),
            run: long(),
            rolled_back_by: Some(1),
            chart: Some(ReportedChart {
                name: "n".repeat(1000),
                version: "v".repeat(1000),
                is_read: true,
            }),
        });
        let report = ReportedRevisions::new("agent", all.collect());
        let numbers = report.newest_first().iter().map(|it| it.revision);
        assert!(numbers.eq((90..100).rev()), "{report:?}");
        for revision in report.newest_first() {
            let labels = [&revision.fingerprint, &revision.owner_uid, &revision.run];
            let chart = revision.chart.as_ref().unwrap();
            let texts = [&revision.status, &chart.name, &chart.version];
            let texts = labels.into_iter().flatten().chain(texts);
            assert!(texts.map(String::len).sum::<usize>() <= 4 * 63 + 2 * 256);
        }
        let again = ReportedRevisions::new("agent", report.newest_first().to_vec());
        assert_eq!(again, report);
    }

    #[test]
    fn chart_with_foreign_characters_is_dropped() {
        for (version, is_kept) in [
            ("1.2.3-rc.1+build_5", true),
            ("v2", true),
            ("1.0.0\n", false),
            ("1.0.0 \u{202e}", false),
            ("é", false),
            ("", false),
        ] {
            for is_read in [true, false] {
                let revisions = vec![revision(1, Some((version, is_read)))];
                let report = ReportedRevisions::new("agent", revisions);
                let chart = &report.newest_first()[0].chart;
                assert_eq!(chart.is_some(), is_kept, "{version:?}");
            }
        }
        let mut named = revision(1, Some(("1", true)));
        named.chart.as_mut().unwrap().name = "a\u{1b}[31m".to_owned();
        let report = ReportedRevisions::new("agent", vec![named]);
        assert_eq!(report.newest_first()[0].chart, None);
    }

    #[test]
    fn known_chart_outlives_later_reports() {
        for (earlier, now, expected) in [
            (Some(("1", true)), None, Some(("1", true))),
            (Some(("1", false)), None, Some(("1", false))),
            (Some(("1", true)), Some(("v1", false)), Some(("1", true))),
            (Some(("v1", false)), Some(("1", true)), Some(("1", true))),
            (Some(("1", true)), Some(("2", true)), Some(("2", true))),
            (None, None, None),
        ] {
            let report = |chart| ReportedRevisions::new("agent", vec![revision(1, chart)]);
            let merged = report(now).with_charts_of(&report(earlier));
            assert_eq!(merged, report(expected), "{earlier:?} {now:?}");
        }
        let other = ReportedRevision {
            created: Some(9),
            ..revision(1, Some(("1", true)))
        };
        let other = ReportedRevisions::new("agent", vec![other]);
        let report = ReportedRevisions::new("agent", vec![revision(1, None)]);
        assert_eq!(report.clone().with_charts_of(&other), report);
    }
}
