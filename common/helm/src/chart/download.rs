//! Downloads an index or a chart over HTTP, with size limits. Sends credentials only to the repository's own
//! origin.

use std::sync::Arc;

use krypton_types::loopback;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, LOCATION};
use reqwest::{Method, Response, Url};

use super::credentials::Credentials;
use super::error::ChartProblem;
use super::target_check::target_refusal;
use super::{index, provenance};

/// Maximum size of a packaged chart in bytes, as in Flux.
pub const CHART_LIMIT: u64 = 10 << 20;
const MAX_REDIRECTS: usize = 5;
const DOWNLOADING: &str = "downloading the chart";

/// Returns whether the URL leads to this machine.
pub(super) fn is_loopback(url: &Url) -> bool {
    url.host_str().is_some_and(loopback::is_loopback)
}

/// Sends the requests of one fetch.
pub(super) struct RepositoryClient {
    pub credentials: Arc<Credentials>,
    /// Whether to allow plain HTTP for credentials and registries.
    pub plain_http: bool,
}

/// A GET request.
pub(super) struct GetRequest {
    /// Completes the sentence "… failed".
    pub attempt: &'static str,
    pub url: Url,
    /// Sent to all hosts, also after redirects.
    pub headers: HeaderMap,
    /// Sent only to the origin of the first URL.
    pub authorization: Option<HeaderValue>,
}

impl RepositoryClient {
    /// Returns whether secrets may be sent to this URL.
    pub(super) fn is_private(&self, url: &Url) -> bool {
        url.scheme() == "https" || self.plain_http || is_loopback(url)
    }

    /// Sends a request and follows redirects. Returns the response with any status, and its URL.
    pub(super) async fn send(&self, request: &GetRequest) -> Result<(Response, Url), ChartProblem> {
        let attempt = request.attempt;
        let redirect_error = |problem| ChartProblem::Redirect { attempt, problem };
        if request.authorization.is_some() && !self.is_private(&request.url) {
            return Err(ChartProblem::PlainHttp);
        }
        let mut url = request.url.clone();
        let mut same_origin = true;
        for _ in 0..=MAX_REDIRECTS {
            let client = if same_origin {
                &self.credentials.repository_client
            } else {
                &self.credentials.other_client
            };
            let mut builder = client
                .request(Method::GET, url.clone())
                .headers(request.headers.clone());
            if let Some(value) = request.authorization.as_ref().filter(|_| same_origin) {
                builder = builder.header(AUTHORIZATION, value.clone());
            }
            let response = builder
                .send()
                .await
                .map_err(|source| unreachable_error(attempt, source))?;
            let location = response.headers().get(LOCATION);
            let next = match (response.status().as_u16(), location) {
                (301 | 302 | 303 | 307 | 308, Some(location)) => location
                    .to_str()
                    .ok()
                    .and_then(|location| url.join(location).ok())
                    .ok_or_else(|| redirect_error("redirected to an invalid URL"))?,
                _ => return Ok((response, url)),
            };
            match (url.scheme(), next.scheme()) {
                (_, "https") | ("http", "http") => {}
                ("https", "http") => return Err(redirect_error("redirected from https to http")),
                _ => return Err(redirect_error("redirected to what is not http(s)")),
            }
            if let Some(problem) = target_refusal(&request.url, &next).await {
                return Err(redirect_error(problem));
            }
            // After a redirect to another origin, a redirect back is not trustworthy either.
            same_origin &= next.origin() == request.url.origin();
            url = next;
        }
        Err(redirect_error("more than 5 redirects"))
    }

    /// Returns the header for an HTTP repository. Like Helm, sends it without a challenge.
    pub(super) fn authorization(&self, repo: &Url) -> Option<HeaderValue> {
        let path = repo.path().trim_matches('/');
        self.credentials.login(repo, path)?.header()
    }

    /// Downloads the archive of an entry of the index.
    pub(super) async fn archive(
        &self,
        repo: &Url,
        entry: &index::IndexEntry,
    ) -> Result<Vec<u8>, ChartProblem> {
        let url = resolve_url(repo, entry).ok_or(ChartProblem::EntryUrl)?;
        let response = self.get_linked(repo, url, DOWNLOADING).await?;
        read_body(response, DOWNLOADING, "the chart", CHART_LIMIT).await
    }

    /// Downloads the provenance file of an entry of the index.
    pub(super) async fn provenance(
        &self,
        repo: &Url,
        entry: &index::IndexEntry,
    ) -> Result<Vec<u8>, ChartProblem> {
        const ATTEMPT: &str = "downloading the provenance file";
        let mut url = resolve_url(repo, entry).ok_or(ChartProblem::EntryUrl)?;
        url.set_path(&format!("{}{}", url.path(), provenance::SUFFIX));
        let response = self.get_linked(repo, url, ATTEMPT).await?;
        read_body(response, ATTEMPT, "the provenance file", provenance::LIMIT).await
    }

    /// Downloads a file that the index names.
    async fn get_linked(
        &self,
        repo: &Url,
        url: Url,
        attempt: &'static str,
    ) -> Result<Response, ChartProblem> {
        if let Some(problem) = target_refusal(repo, &url).await {
            return Err(ChartProblem::Redirect { attempt, problem });
        }
        let is_own = url.origin() == repo.origin();
        let for_others;
        let client = if is_own {
            self
        } else {
            // Another host must not receive the client certificate either.
            for_others = Self {
                credentials: Arc::new(self.credentials.for_others()),
                plain_http: self.plain_http,
            };
            &for_others
        };
        let request = GetRequest {
            attempt,
            url,
            headers: HeaderMap::new(),
            authorization: self.authorization(repo).filter(|_| is_own),
        };
        Ok(client.send(&request).await?.0)
    }
}

/// Returns the body of a successful response, up to `limit` bytes. `what` completes "… is larger than".
pub(super) async fn read_body(
    mut response: Response,
    attempt: &'static str,
    what: &'static str,
    limit: u64,
) -> Result<Vec<u8>, ChartProblem> {
    let status = response.status();
    if !status.is_success() {
        let status = status.as_u16();
        return Err(ChartProblem::Refused { attempt, status });
    }
    let declared = response.content_length().unwrap_or(0);
    if declared > limit {
        return Err(ChartProblem::TooLarge { what, limit });
    }
    let mut bytes = Vec::with_capacity(usize::try_from(declared).unwrap_or(0));
    while let Some(chunk) = response
        .chunk()
        .await
        .map_err(|source| unreachable_error(attempt, source))?
    {
        if (bytes.len() + chunk.len()) as u64 > limit {
            return Err(ChartProblem::TooLarge { what, limit });
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

pub(super) fn unreachable_error(attempt: &'static str, source: reqwest::Error) -> ChartProblem {
    // The URL may contain a password, and the message names the repository anyway.
    let source = source.without_url();
    ChartProblem::Unreachable { attempt, source }
}

/// Appends `name` to the repository's path and keeps the query, as Helm does.
pub(super) fn append_path(repo: &Url, name: &str) -> Url {
    let mut url = repo.clone();
    url.set_fragment(None);
    if let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty().push(name);
    }
    url
}

/// Returns an entry's URL. Plain HTTP from an HTTPS repository requires a digest.
fn resolve_url(repo: &Url, entry: &index::IndexEntry) -> Option<Url> {
    let base = append_path(repo, "");
    let mut url = base.join(&entry.url).ok()?;
    let is_own = url.origin() == base.origin();
    if is_own && url.query().is_none() {
        url.set_query(base.query());
    }
    match url.scheme() {
        "https" => Some(url),
        "http" if repo.scheme() == "http" || entry.digest.is_some() => Some(url),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(repo: &str, url: &str, digest: Option<&str>) -> Option<String> {
        let entry = index::IndexEntry {
            version: "1.0.0".to_owned(),
            url: url.to_owned(),
            digest: digest.map(ToOwned::to_owned),
        };
        resolve_url(&Url::parse(repo).unwrap(), &entry).map(String::from)
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
                append_path(&Url::parse(repo).unwrap(), "index.yaml").as_str(),
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
    fn non_http_urls_and_undigested_downgrades_are_rejected() {
        let repo = "https://example.org";
        assert_eq!(resolved(repo, "file:///etc/passwd", None), None);
        assert_eq!(resolved(repo, "oci://example.org/a", None), None);
        assert_eq!(resolved(repo, "http://example.org/a.tgz", None), None);
        assert!(resolved(repo, "http://example.org/a.tgz", Some("ab")).is_some());
        assert!(resolved("http://example.org", "http://example.org/a.tgz", None).is_some());
    }
}
