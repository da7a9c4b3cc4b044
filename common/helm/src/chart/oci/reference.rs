//! Location of a chart in a registry: `oci://HOST[:PORT]/PATH/NAME`.

use reqwest::Url;

use crate::chart::chart_ref::ChartRef;
use crate::chart::credentials::DOCKER_HUB;

const SCHEME: &str = "oci://";

/// Returns whether the chart is in an OCI registry.
pub(crate) fn is_oci(chart: &ChartRef) -> bool {
    chart.repo.starts_with(SCHEME) || (chart.repo.is_empty() && chart.name.starts_with(SCHEME))
}

/// Location of a chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OciReference {
    /// With https and an empty path.
    pub registry: Url,
    pub repository: String,
}

impl OciReference {
    pub(super) fn parse(chart: &ChartRef) -> Result<Self, &'static str> {
        let url = if chart.repo.is_empty() {
            chart.name.clone()
        } else {
            format!("{}/{}", chart.repo.trim_end_matches('/'), chart.name)
        };
        let rest = url.strip_prefix(SCHEME).unwrap_or_default();
        let (host, repository) = rest.split_once('/').ok_or("it names no chart")?;
        let host = match host {
            "docker.io" | "index.docker.io" => DOCKER_HUB,
            host => host,
        };
        if host.contains('@') {
            return Err("credentials do not go into the address");
        }
        let registry =
            Url::parse(&format!("https://{host}/")).map_err(|_| "it names no registry")?;
        let is_host_only = registry.path() == "/" && registry.query().is_none();
        if !is_host_only || registry.fragment().is_some() {
            return Err("it names no registry");
        }
        if !repository.split('/').all(is_component) || repository.len() > 255 {
            return Err("a part of its path is not valid in a registry");
        }
        Ok(Self {
            registry,
            repository: repository.to_owned(),
        })
    }

    pub(super) fn name(&self) -> &str {
        self.repository
            .rsplit_once('/')
            .map_or(&self.repository, |(_, name)| name)
    }

    /// Returns the URL `/v2/<repository>/<path>`.
    pub(super) fn api_url(&self, registry: &Url, path: &[&str]) -> Url {
        let mut url = registry.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.clear().push("v2");
            segments.extend(self.repository.split('/')).extend(path);
        }
        url
    }
}

/// Returns whether the text consists of letters and digits, with `.`, `_`, `__` or some `-` between them.
fn is_component(text: &str) -> bool {
    let is_alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let mut separator = String::new();
    for c in text.chars() {
        if is_alphanumeric(c) {
            let is_valid = matches!(separator.as_str(), "" | "." | "_" | "__")
                || separator.bytes().all(|byte| byte == b'-');
            if !is_valid {
                return false;
            }
            separator.clear();
        } else {
            separator.push(c);
        }
    }
    text.starts_with(is_alphanumeric) && separator.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(repo: &str, name: &str) -> Result<(String, String), &'static str> {
        let chart = ChartRef {
            repo: repo.to_owned(),
            name: name.to_owned(),
            version: String::new(),
        };
        assert!(is_oci(&chart), "{repo} {name}");
        OciReference::parse(&chart)
            .map(|reference| (reference.registry.to_string(), reference.repository))
    }

    #[test]
    fn chart_reference_accepts_repository_with_name_or_address() {
        for (repo, name, registry, repository) in [
            ("oci://a.org/b", "c", "https://a.org/", "b/c"),
            ("oci://a.org:5000", "c", "https://a.org:5000/", "c"),
            ("oci://a.org/", "c-d", "https://a.org/", "c-d"),
            ("", "oci://[::1]:5000/b/c", "https://[::1]:5000/", "b/c"),
            (
                "oci://docker.io/me",
                "c",
                "https://registry-1.docker.io/",
                "me/c",
            ),
            (
                "oci://a/b__c/d--e/f.g_h",
                "1",
                "https://a/",
                "b__c/d--e/f.g_h/1",
            ),
        ] {
            let expected = (registry.to_owned(), repository.to_owned());
            assert_eq!(parse(repo, name), Ok(expected), "{repo} {name}");
        }
    }

    #[test]
    fn invalid_registry_address_is_rejected() {
        for (repo, name) in [
            ("oci://", "c"),
            ("oci://a.org/b", "../c"),
            ("oci://a.org/b", "C"),
            ("oci://a.org/b", "c?d"),
            ("oci://a.org/b", "c#d"),
            ("oci://a.org/b", "c@sha256:12"),
            ("oci://a.org/b//", "c/"),
            ("oci://a.org/b_-c", "d"),
            ("oci://a.org/b...c", "d"),
            ("oci://a.org?x=/", "d"),
            ("oci://me:pw@a.org", "c"),
            ("", "oci://a.org"),
        ] {
            assert!(parse(repo, name).is_err(), "{repo} {name}");
        }
    }
}
