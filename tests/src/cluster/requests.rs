//! Counts requests from the API server's own metrics.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

const SERIES: &str = "apiserver_request_total{";

/// Sums `apiserver_request_total` by (verb, resource).
pub(super) fn count(metrics: &str) -> Result<BTreeMap<(String, String), u64>> {
    let mut counts = BTreeMap::new();
    for line in metrics.lines() {
        let Some(rest) = line.strip_prefix(SERIES) else {
            continue;
        };
        let (labels, value) = rest
            .rsplit_once("} ")
            .with_context(|| format!("no value in metric {line}"))?;
        // Written as a float; exact up to 2^53.
        let value: f64 = value
            .trim()
            .parse()
            .with_context(|| format!("invalid value in {line}"))?;
        let key = (
            label(labels, "verb").to_owned(),
            label(labels, "resource").to_owned(),
        );
        *counts.entry(key).or_default() += value as u64;
    }
    Ok(counts)
}

/// Returns an empty string if the label is missing. No value of these labels contains a quote or a comma.
fn label<'a>(labels: &'a str, name: &str) -> &'a str {
    let value = |pair: &'a str| {
        pair.strip_prefix(name)?
            .strip_prefix("=\"")?
            .strip_suffix('"')
    };
    labels.split(',').find_map(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: &str = r#"# HELP apiserver_request_total Counter of requests
# TYPE apiserver_request_total counter
apiserver_request_total{code="200",component="apiserver",group="",resource="pods",scope="namespace",subresource="",verb="LIST",version="v1"} 2
apiserver_request_total{code="404",component="apiserver",group="",resource="pods",scope="namespace",subresource="",verb="LIST",version="v1"} 3
apiserver_request_total{code="200",component="apiserver",group="",resource="pods",scope="resource",subresource="status",verb="APPLY",version="v1"} 1.2e+06
apiserver_request_total{code="200",component="",group="",resource="",scope="",subresource="/readyz",verb="GET",version=""} 7
apiserver_request_duration_seconds_count{resource="pods",verb="LIST"} 99
"#;

    #[test]
    fn requests_are_summed_by_verb_and_resource() {
        let counts = count(METRICS).unwrap();
        let expected = [
            ("APPLY", "pods", 1_200_000),
            ("GET", "", 7),
            ("LIST", "pods", 5),
        ];
        let expected = expected.map(|(verb, resource, n)| ((verb.into(), resource.into()), n));
        assert_eq!(counts, BTreeMap::from(expected));
    }

    #[test]
    fn non_numeric_value_is_error() {
        assert!(count("apiserver_request_total{verb=\"GET\"} many\n").is_err());
    }
}
