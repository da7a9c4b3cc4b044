//! Client for charts in OCI registries: tags, manifests, blobs and authentication.
//!
//! No existing library limits the size of responses and lets the caller restrict the hosts that receive a
//! password.

use std::sync::Arc;

use krypton_types::fingerprint::sha256_hex;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, LINK, WWW_AUTHENTICATE};
use reqwest::{Response, Url};
use serde::Deserialize;
use zeroize::Zeroizing;

pub(crate) mod challenge;
mod reference;

pub(super) use reference::{DOCKER_HUB, is_meant};

use challenge::Challenge;
use reference::Place;

use super::astray::leads_astray;
use super::credentials::{self, Login};
use super::download::{Ask, CHART_LIMIT, Way, is_loopback};
use super::version::{self, Asked, Wanted};
use super::{ChartError, ChartRef, provenance};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.cncf.helm.config.v1+json";
/// Helm versions before 3.7 used the second media type.
pub(crate) const CONTENT: [&str; 2] = [
    "application/vnd.cncf.helm.chart.content.v1.tar+gzip",
    "application/tar+gzip",
];
pub(crate) const PROVENANCE: &str = "application/vnd.cncf.helm.chart.provenance.v1.prov";
/// Maximum size that registries accept for a manifest (distribution-spec).
const MANIFEST_LIMIT: u64 = 4 << 20;
const TAGS_LIMIT: u64 = 4 << 20;
const TOKEN_LIMIT: u64 = 256 << 10;
/// Tags per page, and maximum number of pages. No real chart has 100,000 versions.
const PAGE: usize = 1_000;
const PAGES: usize = 100;

const GETTING_IN: &str = "asking for a token";
const TAGS: &str = "listing the tags";
const READING: &str = "reading the manifest";
const DOWNLOADING: &str = "downloading the chart";
const PROVING: &str = "downloading the provenance file";

/// A chart pulled from a registry.
pub(super) struct Pulled {
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
    config: Descriptor,
    layers: Vec<Descriptor>,
}

/// Layers of a chart's manifest.
pub(crate) struct Layers {
    pub(crate) chart: Descriptor,
    pub(crate) provenance: Option<Descriptor>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
}

#[derive(Deserialize)]
struct Tags {
    tags: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Token {
    #[serde(default, deserialize_with = "credentials::secret")]
    token: Option<Zeroizing<String>>,
    #[serde(default, deserialize_with = "credentials::secret")]
    access_token: Option<Zeroizing<String>>,
}

/// Pulls the requested chart and verifies the digests of the manifest and the archive.
pub(super) async fn pull(way: &Way<'_>, asked: &Asked, proven: bool) -> Result<Pulled, ChartError> {
    let mut registry = Registry::open(way)?;
    let version = match &asked.wanted {
        Wanted::Exact(version) => version.clone(),
        wanted => registry.picked(wanted).await?,
    };
    let (version, manifest) = registry.manifest(&version).await?;
    let manifest_sha256 = sha256_hex(&manifest);
    let layers = layers(way.chart, &manifest)?;
    let (bytes, found) = registry
        .blob(&layers.chart, DOWNLOADING, "the chart")
        .await?;
    let provenance = match layers.provenance.filter(|_| proven) {
        Some(layer) => {
            let (bytes, _) = registry
                .blob(&layer, PROVING, "the provenance file")
                .await?;
            Some(bytes)
        }
        None => None,
    };
    Ok(Pulled {
        bytes,
        provenance,
        name: registry.place.name().to_owned(),
        version,
        sha256: found,
        manifest_sha256,
    })
}

/// Returns the version that `wanted` currently resolves to.
pub(super) async fn resolve(way: &Way<'_>, wanted: &Wanted) -> Result<String, ChartError> {
    Registry::open(way)?.picked(wanted).await
}

/// A connection to a registry, with its protocol and authorization.
struct Registry<'a> {
    way: &'a Way<'a>,
    place: Place,
    /// URL of the registry, with the protocol that it answers.
    registry: Url,
    /// Whether the other protocol has not been tried yet.
    may_be_plain: bool,
    authorization: Option<HeaderValue>,
}

impl<'a> Registry<'a> {
    fn open(way: &'a Way<'a>) -> Result<Self, ChartError> {
        let place = Place::of(way.chart).map_err(|problem| ChartError::Registry {
            chart: Arc::clone(way.chart),
            problem,
        })?;
        let mut registry = place.registry.clone();
        let loopback = is_loopback(&registry);
        if way.plain_http && !loopback {
            registry = plain(&registry);
        }
        // Send a token with the first request, but a password only after a challenge.
        let authorization = match way.credentials.login(&place.registry, &place.repository) {
            Some(login @ Login::Bearer(_)) => login.header(),
            Some(Login::Basic { .. }) | None => None,
        };
        Ok(Self {
            way,
            place,
            registry,
            may_be_plain: loopback,
            authorization,
        })
    }

    fn ask(&self, attempt: &'static str, parts: &[&str]) -> Ask {
        Ask {
            attempt,
            url: self.place.below(&self.registry, parts),
            headers: HeaderMap::new(),
            authorization: None,
        }
    }

    /// Sends a request and authenticates if the registry requires it and credentials are available. Returns
    /// the response with any status.
    async fn get(&mut self, mut ask: Ask) -> Result<Response, ChartError> {
        ask.authorization.clone_from(&self.authorization);
        let mut sent = self.way.send(&ask).await;
        // A registry on the loopback interface may omit TLS.
        if let Err(ChartError::Unreachable { source, .. }) = &sent
            && self.may_be_plain
            && source.is_connect()
        {
            let first = sent;
            self.registry = plain(&self.registry);
            ask.url = plain(&ask.url);
            sent = match self.way.send(&ask).await {
                // Report the error of the configured protocol.
                Err(ChartError::Unreachable { source, .. }) if source.is_connect() => first,
                sent => sent,
            };
        }
        self.may_be_plain = false;
        let (response, url) = sent?;
        // Another host that stores blobs receives no credentials.
        let at_home = url.origin() == ask.url.origin();
        if response.status() != 401 || !at_home {
            return Ok(response);
        }
        let said = response.headers().get_all(WWW_AUTHENTICATE);
        let challenge = challenge::parse(said.iter().filter_map(|value| value.to_str().ok()));
        let Some(authorization) = self.let_in(challenge).await? else {
            return Ok(response);
        };
        self.authorization = Some(authorization);
        ask.authorization.clone_from(&self.authorization);
        Ok(self.way.send(&ask).await?.0)
    }

    /// Returns the header that answers the challenge, or `None` if no other credentials are left.
    async fn let_in(
        &self,
        challenge: Option<Challenge>,
    ) -> Result<Option<HeaderValue>, ChartError> {
        let login = self
            .way
            .credentials
            .login(&self.place.registry, &self.place.repository);
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
        let problem = |problem| ChartError::Answer {
            chart: Arc::clone(self.way.chart),
            attempt: GETTING_IN,
            problem,
        };
        let mut url =
            address_of(&realm).ok_or_else(|| problem("the registry names no address for it"))?;
        if url.scheme() == "http" && !self.way.is_private(&url) {
            return Err(problem("the registry names an address without TLS for it"));
        }
        if leads_astray(&self.registry, &url).await.is_some() {
            let why = "the registry names a loopback, link-local or metadata address for it";
            return Err(problem(why));
        }
        {
            let pull = format!("repository:{}:pull", self.place.repository);
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
            true => &self.way.credentials.own,
            false => &self.way.credentials.open,
        };
        let mut request = client.get(url).header(ACCEPT, "application/json");
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let response = request
            .send()
            .await
            .map_err(|source| ChartError::Unreachable {
                chart: Arc::clone(self.way.chart),
                attempt: GETTING_IN,
                source: source.without_url(),
            })?;
        let body = self
            .way
            .body(response, GETTING_IN, "the token", TOKEN_LIMIT)
            .await?;
        let body = Zeroizing::new(body);
        authorization_in(&body)
            .map(Some)
            .ok_or_else(|| problem("the response contains no token"))
    }

    /// Returns the manifest of a version, and the version as its tag spells it.
    async fn manifest(&mut self, version: &str) -> Result<(String, Vec<u8>), ChartError> {
        // Treat versions with and without a leading `v` as equal, as everywhere else.
        let other = match version.strip_prefix('v') {
            Some(without) => without.to_owned(),
            None => format!("v{version}"),
        };
        let mut refused = 404;
        for version in [version.to_owned(), other] {
            let mut ask = self.ask(READING, &["manifests", &tag(&version)]);
            ask.headers
                .insert(ACCEPT, HeaderValue::from_static(MANIFEST));
            let response = self.get(ask).await?;
            refused = response.status().as_u16();
            if refused == 404 {
                continue;
            }
            let announced = response
                .headers()
                .get("docker-content-digest")
                .and_then(|value| value.to_str().ok()?.strip_prefix("sha256:"))
                .map(ToOwned::to_owned);
            let bytes = self
                .way
                .body(response, READING, "the manifest", MANIFEST_LIMIT)
                .await?;
            let found = sha256_hex(&bytes);
            return match announced.filter(|wanted| *wanted != found) {
                Some(wanted) => Err(ChartError::Digest {
                    chart: Arc::clone(self.way.chart),
                    wanted: wanted.escape_debug().to_string(),
                    found,
                }),
                None => Ok((version, bytes)),
            };
        }
        // Find out whether the version or the whole chart is missing. Registries also return 404 for a chart
        // without access.
        let offered = match self.versions().await {
            Ok(offered) => offered,
            Err(ChartError::Refused { .. }) => return Err(self.way.refused(READING, refused)),
            Err(error) => return Err(error),
        };
        let newest = version::pick(&Wanted::Newest, &offered, String::as_str);
        Err(self.no_such_version(newest.cloned()))
    }

    fn no_such_version(&self, newest: Option<String>) -> ChartError {
        ChartError::VersionNotFound {
            chart: Arc::clone(self.way.chart),
            newest,
        }
    }

    /// Downloads a layer and verifies its digest against the manifest.
    async fn blob(
        &mut self,
        layer: &Descriptor,
        attempt: &'static str,
        what: &'static str,
    ) -> Result<(Vec<u8>, String), ChartError> {
        let ask = self.ask(attempt, &["blobs", &layer.digest]);
        let response = self.get(ask).await?;
        let bytes = self.way.body(response, attempt, what, layer.size).await?;
        let wanted = layer.digest.strip_prefix("sha256:").unwrap_or_default();
        let found = sha256_hex(&bytes);
        if found == wanted {
            return Ok((bytes, found));
        }
        Err(ChartError::Digest {
            chart: Arc::clone(self.way.chart),
            wanted: wanted.to_owned(),
            found,
        })
    }

    async fn picked(&mut self, wanted: &Wanted) -> Result<String, ChartError> {
        let offered = self.versions().await?;
        match version::pick(wanted, &offered, String::as_str) {
            Some(version) => Ok(version.clone()),
            None => {
                let newest = version::pick(&Wanted::Newest, &offered, String::as_str);
                Err(self.no_such_version(newest.cloned()))
            }
        }
    }

    /// Returns all tags that are versions, page by page.
    async fn versions(&mut self) -> Result<Vec<String>, ChartError> {
        let mut versions = Vec::new();
        let mut ask = self.ask(TAGS, &["tags", "list"]);
        ask.url
            .query_pairs_mut()
            .append_pair("n", &PAGE.to_string());
        for _ in 0..PAGES {
            let asked = ask.url.clone();
            let response = self.get(ask).await?;
            // Use the protocol that the registry answers.
            let base = match self.registry.scheme() {
                "http" => plain(&asked),
                _ => asked,
            };
            let next = response
                .headers()
                .get(LINK)
                .and_then(|link| next_address(&base, link.to_str().ok()?));
            let body = self
                .way
                .body(response, TAGS, "the list of tags", TAGS_LIMIT)
                .await?;
            let read = versions_in(&body).ok_or_else(|| ChartError::Answer {
                chart: Arc::clone(self.way.chart),
                attempt: TAGS,
                problem: "the answer is not a list of tags",
            })?;
            versions.extend(read);
            // At most 25 MB, if every tag has the maximum length.
            if versions.len() > PAGE * PAGES {
                break;
            }
            let Some(next) = next else {
                return Ok(versions);
            };
            ask = Ask {
                attempt: TAGS,
                url: next,
                headers: HeaderMap::new(),
                authorization: None,
            };
        }
        Err(ChartError::Answer {
            chart: Arc::clone(self.way.chart),
            attempt: TAGS,
            problem: "the list of tags does not end",
        })
    }
}

/// Returns the layers with the chart and, if present, its provenance.
pub(crate) fn layers(chart_ref: &Arc<ChartRef>, manifest: &[u8]) -> Result<Layers, ChartError> {
    let problem = |problem| ChartError::Answer {
        chart: Arc::clone(chart_ref),
        attempt: READING,
        problem,
    };
    let read: Manifest = serde_json::from_slice(manifest)
        .map_err(|_| problem("it is not the manifest of a chart"))?;
    if read.config.media_type != CONFIG {
        return Err(problem("it is not a chart"));
    }
    let of_kind = |kinds: &[&str]| {
        let all = read.layers.iter().cloned();
        let mut found = all.filter(|layer| kinds.contains(&layer.media_type.as_str()));
        (found.next(), found.next())
    };
    let (Some(chart), None) = of_kind(&CONTENT) else {
        return Err(problem("it does not hold exactly one chart"));
    };
    let (provenance, None) = of_kind(&[PROVENANCE]) else {
        return Err(problem("it holds more than one provenance file"));
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
            return Err(problem("the digest of a layer is not a sha256"));
        }
        if layer.size > limit {
            let chart = Arc::clone(chart_ref);
            return Err(ChartError::TooLarge { chart, what, limit });
        }
    }
    Ok(Layers { chart, provenance })
}

/// Returns the URL of a challenge, if it is valid.
pub(crate) fn address_of(realm: &str) -> Option<Url> {
    let url = Url::parse(realm).ok()?;
    (url.has_host() && matches!(url.scheme(), "https" | "http")).then_some(url)
}

/// Returns the header for the token in a response.
pub(crate) fn authorization_in(answer: &[u8]) -> Option<HeaderValue> {
    let read: Token = serde_json::from_slice(answer).ok()?;
    let mut tokens = [read.token, read.access_token].into_iter().flatten();
    credentials::bearer(&tokens.find(|token| !token.is_empty())?)
}

/// Returns the tags of a response that are versions, or `None` if the response is not a list of tags.
pub(crate) fn versions_in(answer: &[u8]) -> Option<Vec<String>> {
    let read: Tags = serde_json::from_slice(answer).ok()?;
    let tags = read.tags.unwrap_or_default();
    // Tags cannot contain `+`. Helm replaces it with `_`.
    let named = tags.iter().map(|tag| tag.replace('_', "+"));
    Some(named.filter(|tag| version::parse(tag).is_some()).collect())
}

/// Returns the address of the next page, if it is on the same registry.
pub(crate) fn next_address(base: &Url, link: &str) -> Option<Url> {
    let url = base.join(next_page(link)?).ok()?;
    (url.origin() == base.origin()).then_some(url)
}

pub(crate) fn tag(version: &str) -> String {
    version.replace('+', "_")
}

/// Returns the same URL with plain HTTP.
fn plain(url: &Url) -> Url {
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
        let (mut parameters, others) = cut(after, ',');
        while !parameters.is_empty() {
            let (parameter, more) = cut(parameters, ';');
            if parameter.replace([' ', '"'], "") == "rel=next" {
                return Some(target);
            }
            parameters = more;
        }
        links = others;
    }
}

/// Splits the text at the first separator outside quotes.
fn cut(text: &str, separator: char) -> (&str, &str) {
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
