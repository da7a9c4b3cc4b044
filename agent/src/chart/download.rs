//! Gets an index or a chart over HTTP, within limits.

use std::sync::Arc;
use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Client, Url};

use super::{ChartError, ChartRef, index};

/// A packaged chart's size limit, in bytes (as Flux has it).
pub const CHART_LIMIT: u64 = 10 << 20;
const CONNECT: Duration = Duration::from_secs(10);
/// Nothing comes for this long: the connection is dead.
const SILENCE: Duration = Duration::from_secs(20);
const REDIRECTS: usize = 5;

/// One client for all repositories. The process-wide rustls provider must be installed.
pub(super) fn client() -> reqwest::Result<Client> {
    let policy = Policy::custom(|attempt| {
        let secure = |url: &Url| url.scheme() == "https";
        if attempt.previous().len() > REDIRECTS {
            attempt.error(format!("more than {REDIRECTS} redirects"))
        } else if attempt.previous().iter().any(secure) && !secure(attempt.url()) {
            attempt.error("redirected from https to http")
        } else {
            attempt.follow()
        }
    });
    Client::builder()
        .user_agent(concat!("krypton/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT)
        .read_timeout(SILENCE)
        .redirect(policy)
        .referer(false)
        .build()
}

pub(super) async fn index(
    http: &Client,
    chart: &Arc<ChartRef>,
    repo: &Url,
) -> Result<Vec<u8>, ChartError> {
    get(
        http,
        chart,
        "reading index.yaml",
        "index.yaml",
        below(repo, "index.yaml"),
        index::LIMIT,
    )
    .await
}

pub(super) async fn chart(
    http: &Client,
    chart: &Arc<ChartRef>,
    repo: &Url,
    entry: &index::Entry,
) -> Result<Vec<u8>, ChartError> {
    let url = resolve(repo, entry).ok_or_else(|| ChartError::Link {
        chart: Arc::clone(chart),
    })?;
    get(
        http,
        chart,
        "downloading the chart",
        "the chart",
        url,
        CHART_LIMIT,
    )
    .await
}

/// The repository's path with `name` added; its query stays, as in Helm.
fn below(repo: &Url, name: &str) -> Url {
    let mut url = repo.clone();
    url.set_fragment(None);
    if let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty().push(name);
    }
    url
}

/// An entry's address. Plain http from an https repository needs a digest to be trusted.
fn resolve(repo: &Url, entry: &index::Entry) -> Option<Url> {
    let base = below(repo, "");
    let mut url = base.join(&entry.url).ok()?;
    let own = url.origin() == base.origin();
    if own && url.query().is_none() {
        url.set_query(base.query());
    }
    match url.scheme() {
        "https" => Some(url),
        "http" if repo.scheme() == "http" || entry.digest.is_some() => Some(url),
        _ => None,
    }
}

async fn get(
    http: &Client,
    chart: &Arc<ChartRef>,
    attempt: &'static str,
    what: &'static str,
    url: Url,
    limit: u64,
) -> Result<Vec<u8>, ChartError> {
    // The URL may carry a password, and the message names the repository anyway.
    let unreachable = |source: reqwest::Error| {
        let source = source.without_url();
        ChartError::Unreachable {
            chart: Arc::clone(chart),
            attempt,
            source,
        }
    };
    let too_large = || ChartError::TooLarge {
        chart: Arc::clone(chart),
        what,
        limit,
    };
    let mut response = http.get(url).send().await.map_err(unreachable)?;
    let status = response.status();
    if !status.is_success() {
        let status = status.as_u16();
        return Err(ChartError::Refused {
            chart: Arc::clone(chart),
            attempt,
            status,
        });
    }
    let announced = response.content_length().unwrap_or(0);
    if announced > limit {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(usize::try_from(announced).unwrap_or(0));
    while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
        if (bytes.len() + chunk.len()) as u64 > limit {
            return Err(too_large());
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(repo: &str, url: &str, digest: Option<&str>) -> Option<String> {
        let entry = index::Entry {
            version: "1.0.0".to_owned(),
            url: url.to_owned(),
            digest: digest.map(ToOwned::to_owned),
        };
        resolve(&Url::parse(repo).unwrap(), &entry).map(String::from)
    }

    #[test]
    fn the_index_is_below_the_repositorys_path() {
        for (repo, index) in [
            ("https://example.org", "https://example.org/index.yaml"),
            (
                "https://example.org/charts",
                "https://example.org/charts/index.yaml",
            ),
            (
                "https://example.org/charts/?key=1",
                "https://example.org/charts/index.yaml?key=1",
            ),
        ] {
            assert_eq!(
                below(&Url::parse(repo).unwrap(), "index.yaml").as_str(),
                index
            );
        }
    }

    #[test]
    fn addresses_are_resolved_against_the_repository() {
        let repo = "https://me:pw@example.org/charts?key=1";
        let cases = [
            ("a.tgz", "https://me:pw@example.org/charts/a.tgz?key=1"),
            ("/a.tgz", "https://me:pw@example.org/a.tgz?key=1"),
            (
                "https://cdn.example.org/a.tgz",
                "https://cdn.example.org/a.tgz",
            ),
        ];
        for (url, expected) in cases {
            assert_eq!(
                resolved(repo, url, None).as_deref(),
                Some(expected),
                "{url}"
            );
        }
    }

    #[test]
    fn only_http_is_followed_and_plain_http_from_https_only_with_a_digest() {
        let repo = "https://example.org";
        assert_eq!(resolved(repo, "file:///etc/passwd", None), None);
        assert_eq!(resolved(repo, "oci://example.org/a", None), None);
        assert_eq!(resolved(repo, "http://example.org/a.tgz", None), None);
        assert!(resolved(repo, "http://example.org/a.tgz", Some("ab")).is_some());
        assert!(resolved("http://example.org", "http://example.org/a.tgz", None).is_some());
    }
}
