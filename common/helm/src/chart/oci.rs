//! Client for charts in OCI registries: tags, manifests, blobs and authentication.
//!
//! No existing library limits the size of responses and lets the caller restrict the hosts that receive a
//! password.

use krypton_types::fingerprint::sha256_hex;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, LINK, WWW_AUTHENTICATE};
use reqwest::{Response, Url};
use serde::Deserialize;
use zeroize::Zeroizing;

pub(crate) mod challenge;
mod reference;

pub(super) use reference::is_oci;

use challenge::Challenge;
use reference::OciReference;

use super::chart_ref::ChartRef;
use super::credentials::{self, Login};
use super::download::{
    CHART_LIMIT, GetRequest, RepositoryClient, is_loopback, read_body, unreachable_error,
};
use super::error::ChartProblem;
use super::provenance;
use super::target_check::target_refusal;
use super::version::{self, RequestedVersion, VersionSelector};

const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG_TYPE: &str = "application/vnd.cncf.helm.config.v1+json";
/// Helm versions before 3.7 used the second media type.
pub(crate) const CONTENT_TYPES: [&str; 2] = [
    "application/vnd.cncf.helm.chart.content.v1.tar+gzip",
    "application/tar+gzip",
];
pub(crate) const PROVENANCE_TYPE: &str = "application/vnd.cncf.helm.chart.provenance.v1.prov";
/// Maximum size that registries accept for a manifest (distribution-spec).
const MANIFEST_LIMIT: u64 = 4 << 20;
const TAGS_LIMIT: u64 = 4 << 20;
const TOKEN_LIMIT: u64 = 256 << 10;
/// Tags per page, and maximum number of pages. No real chart has 100,000 versions.
const PAGE_SIZE: usize = 1_000;
const MAX_PAGES: usize = 100;

const REQUESTING_TOKEN: &str = "asking for a token";
const LISTING_TAGS: &str = "listing the tags";
const READING_MANIFEST: &str = "reading the manifest";
const DOWNLOADING: &str = "downloading the chart";
const DOWNLOADING_PROVENANCE: &str = "downloading the provenance file";

/// A chart pulled from a registry.
pub(super) struct PulledChart {
    pub bytes: Vec<u8>,
    pub name: String,
    /// The version from the chart's tag.
    pub version: String,
    /// Digest of the archive, which matches the manifest.
    pub sha256: String,
    /// Digest of the manifest, by which Helm names a chart in a registry.
    pub manifest_sha256: String,
    /// The provenance file, if one was requested and exists.
    pub provenance: Option<Vec<u8>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    config: LayerDescriptor,
    layers: Vec<LayerDescriptor>,
}

/// Layers of a chart's manifest.
pub(crate) struct ChartLayers {
    pub(crate) chart: LayerDescriptor,
    pub(crate) provenance: Option<LayerDescriptor>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LayerDescriptor {
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
}

#[derive(Deserialize)]
struct TagList {
    tags: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct TokenResponse {
    #[serde(default, deserialize_with = "credentials::secret")]
    token: Option<Zeroizing<String>>,
    #[serde(default, deserialize_with = "credentials::secret")]
    access_token: Option<Zeroizing<String>>,
}

/// Pulls the requested chart and verifies the digests of the manifest and the archive.
pub(super) async fn pull(
    client: &RepositoryClient,
    chart: &ChartRef,
    requested: &RequestedVersion,
    with_provenance: bool,
) -> Result<PulledChart, ChartProblem> {
    let mut registry = RegistryClient::open(client, chart)?;
    let version = match &requested.selector {
        VersionSelector::Exact(version) => version.clone(),
        selector => registry.resolve(selector).await?,
    };
    let (version, manifest) = registry.manifest(&version).await?;
    let manifest_sha256 = sha256_hex(&manifest);
    let layers = layers(&manifest)?;
    let (bytes, sha256) = registry
        .blob(&layers.chart, DOWNLOADING, "the chart")
        .await?;
    let provenance = match layers.provenance.filter(|_| with_provenance) {
        Some(layer) => {
            let (bytes, _) = registry
                .blob(&layer, DOWNLOADING_PROVENANCE, "the provenance file")
                .await?;
            Some(bytes)
        }
        None => None,
    };
    Ok(PulledChart {
        bytes,
        provenance,
        name: registry.reference.name().to_owned(),
        version,
        sha256,
        manifest_sha256,
    })
}

/// Returns the version that `selector` currently resolves to.
pub(super) async fn resolve(
    client: &RepositoryClient,
    chart: &ChartRef,
    selector: &VersionSelector,
) -> Result<String, ChartProblem> {
    RegistryClient::open(client, chart)?.resolve(selector).await
}

/// A connection to a registry, with its protocol and authorization.
struct RegistryClient<'a> {
    client: &'a RepositoryClient,
    reference: OciReference,
    /// URL of the registry, with the protocol that it answers.
    registry: Url,
    /// Whether to try plain HTTP if the registry does not answer over TLS.
    may_use_plain_http: bool,
    authorization: Option<HeaderValue>,
}

impl<'a> RegistryClient<'a> {
    fn open(client: &'a RepositoryClient, chart: &ChartRef) -> Result<Self, ChartProblem> {
        let reference = OciReference::parse(chart).map_err(ChartProblem::Registry)?;
        let mut registry = reference.registry.clone();
        let is_loopback = is_loopback(&registry);
        if client.plain_http && !is_loopback {
            registry = with_plain_http(&registry);
        }
        // Send a token with the first request, but a password only after a challenge.
        let authorization = match client
            .credentials
            .login(&reference.registry, &reference.repository)
        {
            Some(login @ Login::Bearer(_)) => login.header(),
            Some(Login::Basic { .. }) | None => None,
        };
        Ok(Self {
            client,
            reference,
            registry,
            may_use_plain_http: is_loopback,
            authorization,
        })
    }

    fn request(&self, attempt: &'static str, path: &[&str]) -> GetRequest {
        GetRequest {
            attempt,
            url: self.reference.api_url(&self.registry, path),
            headers: HeaderMap::new(),
            authorization: None,
        }
    }

    /// Sends a request and authenticates if the registry requires it and credentials are available. Returns
    /// the response with any status.
    async fn get(&mut self, mut request: GetRequest) -> Result<Response, ChartProblem> {
        request.authorization.clone_from(&self.authorization);
        let mut result = self.client.send(&request).await;
        // A registry on the loopback interface may omit TLS.
        if let Err(ChartProblem::Unreachable { source, .. }) = &result
            && self.may_use_plain_http
            && source.is_connect()
        {
            let first_result = result;
            self.registry = with_plain_http(&self.registry);
            request.url = with_plain_http(&request.url);
            result = match self.client.send(&request).await {
                // Report the error of the configured protocol.
                Err(ChartProblem::Unreachable { source, .. }) if source.is_connect() => {
                    first_result
                }
                result => result,
            };
        }
        self.may_use_plain_http = false;
        let (response, url) = result?;
        // Another host that stores blobs receives no credentials.
        let same_origin = url.origin() == request.url.origin();
        if response.status() != 401 || !same_origin {
            return Ok(response);
        }
        let headers = response.headers().get_all(WWW_AUTHENTICATE);
        let challenge = challenge::parse(headers.iter().filter_map(|value| value.to_str().ok()));
        let Some(authorization) = self.authorize(challenge).await? else {
            return Ok(response);
        };
        self.authorization = Some(authorization);
        request.authorization.clone_from(&self.authorization);
        Ok(self.client.send(&request).await?.0)
    }

    /// Returns the header that answers the challenge, or `None` if no other credentials are left.
    async fn authorize(
        &self,
        challenge: Option<Challenge>,
    ) -> Result<Option<HeaderValue>, ChartProblem> {
        let login = self
            .client
            .credentials
            .login(&self.reference.registry, &self.reference.repository);
        let (realm, service, scope) = match (challenge, login) {
            (Some(Challenge::Basic), Some(login @ Login::Basic { .. })) => {
                return Ok(login.header());
            }
            // The registry rejected a configured token, and no token service could issue a better one.
            (Some(Challenge::Bearer { .. }), Some(Login::Bearer(_)))
            | (Some(Challenge::Basic) | None, _) => return Ok(None),
            (
                Some(Challenge::Bearer {
                    realm,
                    service,
                    scope,
                }),
                _,
            ) => (realm, service, scope),
        };
        let response_error = |problem| invalid_response(REQUESTING_TOKEN, problem);
        let mut url = realm_url(&realm)
            .ok_or_else(|| response_error("the registry names no address for it"))?;
        if url.scheme() == "http" && !self.client.is_private(&url) {
            return Err(response_error(
                "the registry names an address without TLS for it",
            ));
        }
        if target_refusal(&self.registry, &url).await.is_some() {
            let problem = "the registry names a loopback, link-local or metadata address for it";
            return Err(response_error(problem));
        }
        {
            let pull = format!("repository:{}:pull", self.reference.repository);
            let mut query = url.query_pairs_mut();
            if let Some(service) = &service {
                query.append_pair("service", service);
            }
            query.append_pair("scope", scope.as_deref().unwrap_or(&pull));
        }
        let authorization = login.and_then(Login::header);
        // Use the client for the token service's host and follow no redirects, because the password is only
        // for this host.
        let client = match url.origin() == self.registry.origin() {
            true => &self.client.credentials.repository_client,
            false => &self.client.credentials.other_client,
        };
        let mut builder = client.get(url).header(ACCEPT, "application/json");
        if let Some(authorization) = authorization {
            builder = builder.header(AUTHORIZATION, authorization);
        }
        let response = builder
            .send()
            .await
            .map_err(|source| unreachable_error(REQUESTING_TOKEN, source))?;
        let body = read_body(response, REQUESTING_TOKEN, "the token", TOKEN_LIMIT).await?;
        let body = Zeroizing::new(body);
        token_header(&body)
            .map(Some)
            .ok_or_else(|| response_error("the response contains no token"))
    }

    /// Returns the manifest of a version, and the version as its tag spells it.
    async fn manifest(&mut self, version: &str) -> Result<(String, Vec<u8>), ChartProblem> {
        // Treat versions with and without a leading `v` as equal, as everywhere else.
        let other_spelling = match version.strip_prefix('v') {
            Some(without) => without.to_owned(),
            None => format!("v{version}"),
        };
        let mut status = 404;
        for version in [version.to_owned(), other_spelling] {
            let mut request = self.request(READING_MANIFEST, &["manifests", &tag(&version)]);
            request
                .headers
                .insert(ACCEPT, HeaderValue::from_static(MANIFEST_TYPE));
            let response = self.get(request).await?;
            status = response.status().as_u16();
            if status == 404 {
                continue;
            }
            let declared = response
                .headers()
                .get("docker-content-digest")
                .and_then(|value| value.to_str().ok()?.strip_prefix("sha256:"))
                .map(ToOwned::to_owned);
            let bytes =
                read_body(response, READING_MANIFEST, "the manifest", MANIFEST_LIMIT).await?;
            let actual = sha256_hex(&bytes);
            return match declared.filter(|declared| *declared != actual) {
                Some(declared) => Err(ChartProblem::Digest {
                    expected: declared.escape_debug().to_string(),
                    actual,
                }),
                None => Ok((version, bytes)),
            };
        }
        // Find out whether the version or the whole chart is missing. Registries also return 404 for a chart
        // without access.
        match self.versions().await {
            Ok(offered) => Err(version_not_found(&offered)),
            Err(ChartProblem::Refused { .. }) => Err(ChartProblem::Refused {
                attempt: READING_MANIFEST,
                status,
            }),
            Err(problem) => Err(problem),
        }
    }

    /// Downloads a layer and verifies its digest against the manifest.
    async fn blob(
        &mut self,
        layer: &LayerDescriptor,
        attempt: &'static str,
        what: &'static str,
    ) -> Result<(Vec<u8>, String), ChartProblem> {
        let request = self.request(attempt, &["blobs", &layer.digest]);
        let response = self.get(request).await?;
        let bytes = read_body(response, attempt, what, layer.size).await?;
        let expected = layer.digest.strip_prefix("sha256:").unwrap_or_default();
        let actual = sha256_hex(&bytes);
        if actual == expected {
            return Ok((bytes, actual));
        }
        Err(ChartProblem::Digest {
            expected: expected.to_owned(),
            actual,
        })
    }

    /// Returns the version that `selector` currently resolves to.
    async fn resolve(&mut self, selector: &VersionSelector) -> Result<String, ChartProblem> {
        let offered = self.versions().await?;
        let version = version::pick(selector, &offered, String::as_str).cloned();
        version.ok_or_else(|| version_not_found(&offered))
    }

    /// Returns all tags that are versions, page by page.
    async fn versions(&mut self) -> Result<Vec<String>, ChartProblem> {
        let mut versions = Vec::new();
        let mut request = self.request(LISTING_TAGS, &["tags", "list"]);
        request
            .url
            .query_pairs_mut()
            .append_pair("n", &PAGE_SIZE.to_string());
        for _ in 0..MAX_PAGES {
            let url = request.url.clone();
            let response = self.get(request).await?;
            // Use the protocol that the registry answers.
            let base = match self.registry.scheme() {
                "http" => with_plain_http(&url),
                _ => url,
            };
            let next = response
                .headers()
                .get(LINK)
                .and_then(|link| next_page_url(&base, link.to_str().ok()?));
            let body = read_body(response, LISTING_TAGS, "the list of tags", TAGS_LIMIT).await?;
            let not_a_list = || invalid_response(LISTING_TAGS, "the answer is not a list of tags");
            versions.extend(versions_in(&body).ok_or_else(not_a_list)?);
            // At most 25 MB, if every tag has the maximum length.
            if versions.len() > PAGE_SIZE * MAX_PAGES {
                break;
            }
            let Some(next) = next else {
                return Ok(versions);
            };
            request = GetRequest {
                attempt: LISTING_TAGS,
                url: next,
                headers: HeaderMap::new(),
                authorization: None,
            };
        }
        Err(invalid_response(
            LISTING_TAGS,
            "the list of tags does not end",
        ))
    }
}

fn version_not_found(offered: &[String]) -> ChartProblem {
    let newest = version::pick(&VersionSelector::Newest, offered, String::as_str).cloned();
    ChartProblem::VersionNotFound { newest }
}

fn invalid_response(attempt: &'static str, problem: &'static str) -> ChartProblem {
    ChartProblem::InvalidResponse { attempt, problem }
}

/// Returns the layers with the chart and, if present, its provenance.
pub(crate) fn layers(manifest: &[u8]) -> Result<ChartLayers, ChartProblem> {
    let response_error = |problem| invalid_response(READING_MANIFEST, problem);
    let manifest: Manifest = serde_json::from_slice(manifest)
        .map_err(|_| response_error("it is not the manifest of a chart"))?;
    if manifest.config.media_type != CONFIG_TYPE {
        return Err(response_error("it is not a chart"));
    }
    let layers_of_type = |media_types: &[&str]| {
        let all = manifest.layers.iter().cloned();
        let mut matching = all.filter(|layer| media_types.contains(&layer.media_type.as_str()));
        (matching.next(), matching.next())
    };
    let (Some(chart), None) = layers_of_type(&CONTENT_TYPES) else {
        return Err(response_error("it does not hold exactly one chart"));
    };
    let (provenance, None) = layers_of_type(&[PROVENANCE_TYPE]) else {
        return Err(response_error("it holds more than one provenance file"));
    };
    let limits = [
        (Some(&chart), "the chart", CHART_LIMIT),
        (
            provenance.as_ref(),
            "the provenance file",
            provenance::LIMIT,
        ),
    ];
    for (layer, what, limit) in limits {
        let Some(layer) = layer else { continue };
        let digest = layer.digest.strip_prefix("sha256:");
        if !digest.is_some_and(version::is_sha256) {
            return Err(response_error("the digest of a layer is not a sha256"));
        }
        if layer.size > limit {
            return Err(ChartProblem::TooLarge { what, limit });
        }
    }
    Ok(ChartLayers { chart, provenance })
}

/// Returns the URL of a challenge, if it is valid.
pub(crate) fn realm_url(realm: &str) -> Option<Url> {
    let url = Url::parse(realm).ok()?;
    (url.has_host() && matches!(url.scheme(), "https" | "http")).then_some(url)
}

/// Returns the header for the token in a response.
pub(crate) fn token_header(body: &[u8]) -> Option<HeaderValue> {
    let response: TokenResponse = serde_json::from_slice(body).ok()?;
    let mut tokens = [response.token, response.access_token]
        .into_iter()
        .flatten();
    credentials::bearer(&tokens.find(|token| !token.is_empty())?)
}

/// Returns the tags of a response that are versions, or `None` if the response is not a list of tags.
pub(crate) fn versions_in(body: &[u8]) -> Option<Vec<String>> {
    let list: TagList = serde_json::from_slice(body).ok()?;
    let tags = list.tags.unwrap_or_default();
    // Tags cannot contain `+`. Helm replaces it with `_`.
    let versions = tags.iter().map(|tag| tag.replace('_', "+"));
    Some(
        versions
            .filter(|version| version::parse(version).is_some())
            .collect(),
    )
}

/// Returns the address of the next page, if it is on the same registry.
pub(crate) fn next_page_url(base: &Url, link: &str) -> Option<Url> {
    let url = base.join(next_page(link)?).ok()?;
    (url.origin() == base.origin()).then_some(url)
}

pub(crate) fn tag(version: &str) -> String {
    version.replace('+', "_")
}

/// Returns the same URL with plain HTTP.
fn with_plain_http(url: &Url) -> Url {
    let text = url.as_str().replacen("https://", "http://", 1);
    // An explicit port stays the same. An implicit one becomes the default port of HTTP.
    Url::parse(&text).unwrap_or_else(|_| url.clone())
}

/// Returns the target of `<…>; rel="next"`.
pub(crate) fn next_page(link: &str) -> Option<&str> {
    let mut links = link;
    loop {
        // The target may contain commas.
        let (target, after) = links.split_once('<')?.1.split_once('>')?;
        let (mut parameters, other_links) = split_unquoted(after, ',');
        while !parameters.is_empty() {
            let (parameter, other_parameters) = split_unquoted(parameters, ';');
            if parameter.replace([' ', '"'], "") == "rel=next" {
                return Some(target);
            }
            parameters = other_parameters;
        }
        links = other_links;
    }
}

/// Splits the text at the first separator outside quotes.
fn split_unquoted(text: &str, separator: char) -> (&str, &str) {
    let mut quoted = false;
    let parts = text.split_once(|c| {
        quoted ^= c == '"';
        c == separator && !quoted
    });
    parts.unwrap_or((text, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_header_locates_next_page() {
        let link = r#"</v2/a/tags/list?last=x&n=2>; rel="next""#;
        assert_eq!(next_page(link), Some("/v2/a/tags/list?last=x&n=2"));
        assert_eq!(next_page("</a>; rel=prev, </b>;rel=next"), Some("/b"));
        assert_eq!(next_page("</a>; rel=prev"), None);
        assert_eq!(next_page("</a?x=1,2>; rel=next"), Some("/a?x=1,2"));
        let quoted = r#"</a>; title="x, </c>; rel=next", </b,c>; rel="next""#;
        assert_eq!(next_page(quoted), Some("/b,c"));
        assert_eq!(next_page("rubbish"), None);
    }

    #[test]
    fn a_plus_is_an_underscore_in_tags() {
        assert_eq!(tag("1.2.3+build.5"), "1.2.3_build.5");
    }
}
