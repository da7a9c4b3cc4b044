//! Parses a histogram from a Prometheus text, and computes the difference of two readings and its quantiles.

use anyhow::{Context, Result, bail};

/// Observations by bucket: the upper bound and the cumulative count.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Histogram {
    buckets: Vec<(f64, u64)>,
}

impl Histogram {
    pub(crate) fn read(metrics: &str, name: &str) -> Result<Self> {
        let prefix = format!("{name}_bucket{{");
        let mut buckets = Vec::new();
        for line in metrics.lines() {
            let Some(rest) = line.strip_prefix(&prefix) else {
                continue;
            };
            let bucket = || {
                let (labels, count) = rest.rsplit_once("} ")?;
                let (_, bound) = labels.split_once("le=\"")?;
                let (bound, _) = bound.split_once('"')?;
                Some((bound.parse::<f64>().ok()?, count.trim().parse().ok()?))
            };
            buckets.push(bucket().with_context(|| format!("reading {line}"))?);
        }
        if buckets.is_empty() {
            bail!("no histogram {name}");
        }
        Ok(Self { buckets })
    }

    pub(crate) fn count(&self) -> u64 {
        self.buckets.last().map_or(0, |(_, count)| *count)
    }

    /// Returns the observations since `earlier`, a reading of the same process.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let before = earlier.buckets.iter().map(|(_, count)| *count);
        let buckets = self.buckets.iter().zip(before);
        Self {
            buckets: buckets
                .map(|((bound, now), before)| (*bound, now.saturating_sub(before)))
                .collect(),
        }
    }

    /// Interpolates linearly within a bucket, like PromQL's histogram_quantile.
    pub(crate) fn quantile(&self, quantile: f64) -> f64 {
        let rank = quantile * self.count() as f64;
        let (mut lower, mut below) = (0.0, 0);
        for &(bound, count) in &self.buckets {
            if count > 0 && count as f64 >= rank {
                if bound.is_infinite() {
                    return lower;
                }
                let inside = (count - below) as f64;
                let part = ((rank - below as f64) / inside).clamp(0.0, 1.0);
                return lower + (bound - lower) * if inside > 0.0 { part } else { 1.0 };
            }
            (lower, below) = (bound, count);
        }
        f64::NAN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# TYPE took_seconds histogram
took_seconds_sum 1.0
took_seconds_count 10
took_seconds_bucket{le=\"0.1\"} 4
took_seconds_bucket{le=\"0.2\"} 9
took_seconds_bucket{le=\"+Inf\"} 10
other_bucket{le=\"0.1\"} 7
";

    #[test]
    fn a_quantile_lies_within_its_bucket() {
        let all = Histogram::read(TEXT, "took_seconds").unwrap();
        assert_eq!(all.count(), 10);
        assert!((all.quantile(0.4) - 0.1).abs() < 1e-9);
        assert!((all.quantile(0.65) - 0.15).abs() < 1e-9);
        // Values beyond the last bound are unknown.
        assert!((all.quantile(0.99) - 0.2).abs() < 1e-9);
        assert!(Histogram::default().quantile(0.5).is_nan());
    }

    #[test]
    fn histogram_difference_counts_only_later_samples() {
        let later = TEXT
            .replace("\"0.2\"} 9", "\"0.2\"} 19")
            .replace("\"+Inf\"} 10", "\"+Inf\"} 20");
        let [before, after] =
            [TEXT, &later].map(|text| Histogram::read(text, "took_seconds").unwrap());
        let between = after.since(&before);
        assert_eq!(between.count(), 10);
        assert!((between.quantile(0.5) - 0.15).abs() < 1e-9);
    }

    #[test]
    fn missing_or_malformed_histogram_is_error() {
        assert!(Histogram::read(TEXT, "took").is_err());
        assert!(Histogram::read("took_bucket{le=\"x\"} 1\n", "took").is_err());
    }
}
