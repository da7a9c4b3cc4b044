//! Tests of repositories that require authentication, compress their index, or use `ETag`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use tokio::net::TcpListener;

use super::archive::tests::{chart_yaml, packed};
use super::*;

/// A test server that returns 404 for unknown files.
#[derive(Clone, Default)]
struct StubSite {
    files: Arc<Mutex<BTreeMap<String, Bytes>>>,
    /// Values of the `location` header, by path. They replace the file.
    redirects: Arc<Mutex<BTreeMap<String, String>>>,
    /// The `authorization` header of each request, or an empty text.
    authorizations: Arc<Mutex<Vec<(String, String)>>>,
    requires_login: bool,
    tag: Option<&'static str>,
    compresses_index: bool,
}

async fn respond(State(site): State<StubSite>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let header = |name: &str| {
        let value = request.headers().get(name);
        value.map_or("", |value| value.to_str().unwrap()).to_owned()
    };
    let authorization = header("authorization");
    let has_login = !authorization.is_empty();
    site.authorizations
        .lock()
        .unwrap()
        .push((path.clone(), authorization));
    if site.requires_login && !has_login {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if let Some(to) = site.redirects.lock().unwrap().get(&path) {
        return (StatusCode::FOUND, [("location", to.clone())]).into_response();
    }
    let Some(file) = site.files.lock().unwrap().get(&path).cloned() else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let mut headers = HeaderMap::new();
    if let Some(tag) = site.tag.filter(|_| path == "/index.yaml") {
        headers.insert("etag", tag.parse().unwrap());
        if header("if-none-match") == tag {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
    }
    if site.compresses_index && path == "/index.yaml" {
        assert_eq!(header("accept-encoding"), "gzip");
        headers.insert("content-encoding", "gzip".parse().unwrap());
    }
    (headers, file).into_response()
}

impl StubSite {
    async fn start(self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let app = Router::new().fallback(respond).with_state(self);
        tokio::spawn(async move { axum::serve(listener, app).await });
        url
    }

    fn with(self, path: &str, content: impl Into<Bytes>) -> Self {
        let mut files = self.files.lock().unwrap();
        files.insert(path.to_owned(), content.into());
        drop(files);
        self
    }

    fn take_authorizations(&self) -> Vec<(String, String)> {
        std::mem::take(&mut *self.authorizations.lock().unwrap())
    }
}

fn tgz(version: &str) -> Vec<u8> {
    packed(&[chart_yaml("small", version)])
}

fn index(version: &str, url: &str) -> String {
    format!("entries: {{small: [{{version: {version}, urls: ['{url}']}}]}}")
}

fn gzipped(text: &str) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut gzip, text.as_bytes()).unwrap();
    gzip.finish().unwrap()
}

fn chart(repo: &str, version: &str) -> ChartRef {
    ChartRef {
        repo: repo.to_owned(),
        name: "small".to_owned(),
        version: version.to_owned(),
    }
}

fn credentials(data: &[(&str, &str)]) -> CurrentCredentials {
    let data = data
        .iter()
        .map(|(key, value)| ((*key).to_owned(), ByteString(value.as_bytes().to_vec())));
    let secret = Secret {
        data: Some(data.collect()),
        ..Secret::default()
    };
    Ok(Arc::new(Credentials::from_secret(&secret).unwrap()))
}

fn cache() -> (tempfile::TempDir, ChartCache) {
    // Another test may have installed the provider already.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let dir = tempfile::tempdir().unwrap();
    let cache = ChartCache::new(dir.path().join("charts")).unwrap();
    (dir, cache)
}

const LOGIN: [(&str, &str); 2] = [("username", "me"), ("password", "hunter2")];
const LOGIN_HEADER: &str = "Basic bWU6aHVudGVyMg==";

#[tokio::test]
async fn unchanged_index_is_not_downloaded_again() {
    let site = StubSite {
        tag: Some("\"one\""),
        ..StubSite::default()
    }
    .with("/index.yaml", index("1.0.0", "a.tgz"))
    .with("/a.tgz", tgz("1.0.0"));
    let url = site.clone().start().await;
    let (_dir, cache) = cache();
    assert_eq!(cache.resolve(&chart(&url, "^1")).await.unwrap(), "1.0.0");
    // The tag has not changed, so the cached index is still used.
    let site = site.with("/index.yaml", index("1.1.0", "a.tgz"));
    assert_eq!(cache.resolve(&chart(&url, "^1")).await.unwrap(), "1.0.0");
    assert!(cache.fetch(&chart(&url, "1.0.0")).await.is_ok());

    // A damaged cached index is downloaded again.
    let index_files = std::fs::read_dir(&cache.dir).unwrap();
    let index_files = index_files.map(|entry| entry.unwrap().path());
    let index_files = index_files.filter(|path| {
        path.extension()
            .is_some_and(|extension| extension == "yaml")
    });
    let index_files: Vec<_> = index_files.collect();
    assert_eq!(index_files.len(), 1);
    std::fs::write(&index_files[0], "rubbish").unwrap();
    assert_eq!(cache.resolve(&chart(&url, "^1")).await.unwrap(), "1.1.0");
    drop(site);
}

#[tokio::test]
async fn indexes_of_replaced_repositories_are_deleted() {
    let (_dir, cache) = cache();
    for _ in 0..8 {
        let site = StubSite {
            tag: Some("\"one\""),
            ..StubSite::default()
        };
        let url = site
            .with("/index.yaml", index("1.0.0", "a.tgz"))
            .start()
            .await;
        cache.resolve(&chart(&url, "*")).await.unwrap();
    }
    assert_eq!(std::fs::read_dir(&cache.dir).unwrap().count(), 4);
}

#[tokio::test]
async fn a_packed_index_is_unpacked_within_its_limit() {
    let (_dir, cache) = cache();
    let bomb = format!("entries: {{}}\n#{}", "0".repeat(51 << 20));
    for (content, expected) in [
        (gzipped(&index("1.2.0", "a.tgz")), "1.2.0"),
        (gzipped(&bomb), "larger than 50 MiB"),
        (b"rubbish".to_vec(), "is damaged"),
    ] {
        let site = StubSite {
            compresses_index: true,
            ..StubSite::default()
        };
        let url = site.with("/index.yaml", content).start().await;
        let outcome = match cache.resolve(&chart(&url, "^1")).await {
            Ok(version) => version,
            Err(error) => error.to_string(),
        };
        assert!(outcome.contains(expected), "{outcome}");
    }
}

#[tokio::test]
async fn credentials_are_sent_only_to_chart_repository() {
    let elsewhere = StubSite::default()
        .with("/a.tgz", tgz("1.0.0"))
        .with("/c.tgz", tgz("1.2.0"));
    let other = elsewhere.clone().start().await;
    let site = StubSite {
        requires_login: true,
        ..StubSite::default()
    };
    let url = site.clone().start().await;
    let (_dir, cache) = cache();
    let (sender, current) = watch::channel(Err("they have not been read yet".into()));
    let cache = cache.with_credentials(current);

    let error = cache.resolve(&chart(&url, "^1")).await.unwrap_err();
    assert!(error.to_string().ends_with("not been read yet"), "{error}");
    assert!(site.take_authorizations().is_empty());
    drop(sender.send_replace(credentials(&LOGIN)));

    // The chart is on another host, behind a redirect to another host, or on the own host.
    for (number, (url_of_chart, to)) in [
        (format!("{other}/a.tgz"), None),
        ("/b.tgz".to_owned(), Some(format!("{other}/a.tgz"))),
        ("/own.tgz".to_owned(), None),
    ]
    .into_iter()
    .enumerate()
    {
        let is_elsewhere = number < 2;
        let _ = site
            .clone()
            .with("/index.yaml", index("1.0.0", &url_of_chart))
            .with("/own.tgz", tgz("1.0.0"));
        if let Some(to) = to {
            site.redirects.lock().unwrap().insert(url_of_chart, to);
        }
        let cache = &cache;
        cache.entries.lock().unwrap().clear();
        cache.fetch(&chart(&url, "1.0.0")).await.unwrap();
        assert!(
            site.take_authorizations()
                .iter()
                .all(|(_, header)| header == LOGIN_HEADER)
        );
        let others = elsewhere.take_authorizations();
        assert_eq!(others.len(), usize::from(is_elsewhere), "{others:?}");
        assert!(
            others.iter().all(|(_, header)| header.is_empty()),
            "{others:?}"
        );
    }

    // Another host redirects back to the own host: the credentials are not sent again.
    elsewhere
        .redirects
        .lock()
        .unwrap()
        .insert("/back.tgz".to_owned(), format!("{url}/own.tgz"));
    site.redirects
        .lock()
        .unwrap()
        .insert("/away.tgz".to_owned(), format!("{other}/back.tgz"));
    let _ = site
        .clone()
        .with("/index.yaml", index("1.0.0", "/away.tgz"));
    cache.entries.lock().unwrap().clear();
    let error = cache.fetch(&chart(&url, "1.0.0")).await.unwrap_err();
    assert!(error.to_string().contains("returned 401"), "{error}");
    assert!(!format!("{error}{error:?}{cache:?}").contains("hunter2"));
}

#[tokio::test]
async fn new_credentials_are_tried_immediately() {
    let site = StubSite {
        requires_login: true,
        ..StubSite::default()
    }
    .with("/index.yaml", index("1.0.0", "a.tgz"))
    .with("/a.tgz", tgz("1.0.0"));
    let url = site.start().await;
    let (_dir, cache) = cache();
    let (sender, current) = watch::channel(Err("there is no such Secret".into()));
    let cache = cache.with_credentials(current);
    let chart = chart(&url, "1.0.0");
    assert!(cache.fetch(&chart).await.is_err());
    drop(sender.send_replace(credentials(&[("token", "t0ken")])));
    // The back-off lasts at least one second.
    assert!(cache.fetch(&chart).await.is_err());
    cache.forget_failures();
    assert_eq!(cache.fetch(&chart).await.unwrap().version, "1.0.0");
}

#[tokio::test]
async fn credentials_are_not_sent_over_plain_http() {
    let (_dir, cache) = cache();
    let cache = cache.with_credentials(watch::channel(credentials(&LOGIN)).1);
    // An address reserved for documentation. The fetch fails before it sends a request.
    let plain_http = chart("http://192.0.2.1", "1.0.0");
    let error = cache.fetch(&plain_http).await.unwrap_err();
    assert!(matches!(*error, ChartError::PlainHttp { .. }), "{error}");
    assert!(error.to_string().contains("--insecure-chart-http"));
}

#[tokio::test]
async fn pinned_digest_is_checked_against_chart_archive() {
    let site = StubSite::default()
        .with("/index.yaml", index("1.0.0", "a.tgz"))
        .with("/a.tgz", tgz("1.0.0"));
    let url = site.start().await;
    let sha256 = krypton_types::fingerprint::sha256_hex(&tgz("1.0.0"));
    let (_dir, cache) = cache();
    let fetched = cache
        .fetch(&chart(&url, &format!("1.0.0@sha256:{sha256}")))
        .await
        .unwrap();
    assert_eq!(fetched.sha256, sha256);
    let other = format!("1.0.0@sha256:{}", "0".repeat(64));
    let error = cache.fetch(&chart(&url, &other)).await.unwrap_err();
    assert!(matches!(*error, ChartError::Digest { .. }), "{error}");
}

/// A TLS server with a custom authority that requires a client certificate of the same authority.
struct PrivateRepository {
    url: String,
    ca: String,
    certificate: String,
    key: String,
}

impl PrivateRepository {
    async fn start(content: &'static str) -> Self {
        use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
        let ca_key = KeyPair::generate().unwrap();
        let mut ca = CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
        let issuer = Issuer::new(ca, ca_key);
        let leaf = |name: &str| {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
            (params.signed_by(&key, &issuer).unwrap(), key)
        };
        let (server, server_key) = leaf("127.0.0.1");
        let (client, client_key) = leaf("krypton");
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate_of(&ca_pem)).unwrap();
        let verifier = rustls::server::WebPkiClientVerifier::builder(Arc::new(roots))
            .build()
            .unwrap();
        let config = rustls::ServerConfig::builder()
            .with_client_cert_verifier(verifier)
            .with_single_cert(
                vec![server.der().clone()],
                rustls::pki_types::PrivateKeyDer::Pkcs8(server_key.serialize_der().into()),
            )
            .unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    use tokio::io::{AsyncReadExt, AsyncWriteExt};
                    let mut stream = acceptor.accept(stream).await.ok()?;
                    let mut request = Vec::new();
                    while !request.ends_with(b"\r\n\r\n") {
                        request.push(stream.read_u8().await.ok()?);
                    }
                    let response = format!(
                        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{content}",
                        content.len()
                    );
                    stream.write_all(response.as_bytes()).await.ok()?;
                    stream.shutdown().await.ok()
                });
            }
        });
        Self {
            url,
            ca: ca_pem,
            certificate: client.pem(),
            key: client_key.serialize_pem(),
        }
    }
}

fn certificate_of(pem: &str) -> rustls::pki_types::CertificateDer<'static> {
    use rustls::pki_types::pem::PemObject;
    rustls::pki_types::CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

#[tokio::test]
async fn private_repository_needs_ca_and_client_certificate() {
    let (_dir, cache) = cache();
    let private =
        PrivateRepository::start("entries: {small: [{version: 1.0.0, urls: [a.tgz]}]}").await;
    let wanted = chart(&private.url, "^1");
    // Fails without the authority, and with the authority but without the certificate.
    assert!(cache.resolve(&wanted).await.is_err());
    let (sender, current) = watch::channel(credentials(&[("ca.crt", &private.ca)]));
    let cache = cache.with_credentials(current);
    assert!(cache.resolve(&wanted).await.is_err());
    drop(sender.send_replace(credentials(&[
        ("ca.crt", &private.ca),
        ("tls.crt", &private.certificate),
        ("tls.key", &private.key),
    ])));
    assert_eq!(cache.resolve(&wanted).await.unwrap(), "1.0.0");
}

#[tokio::test]
async fn configured_source_is_the_only_one() {
    struct CountingFallback(Mutex<u32>);
    impl Fallback for CountingFallback {
        fn fetch(&self, _: &ChartRef) -> BoxFuture<'_, Result<Vec<u8>, String>> {
            *self.0.lock().unwrap() += 1;
            Box::pin(async { Ok(tgz("1.0.0")) })
        }
    }
    for (source, succeeds, hub_calls) in [
        (ChartSource::Direct, false, 0),
        (ChartSource::Auto, true, 1),
        (ChartSource::Hub, true, 1),
    ] {
        let site = StubSite {
            requires_login: true,
            ..StubSite::default()
        };
        let url = site.clone().start().await;
        let hub = Arc::new(CountingFallback(Mutex::default()));
        let (_dir, cache) = cache();
        let cache = cache.with_fallback(Arc::clone(&hub) as Arc<dyn Fallback>, source);
        let fetched = cache.fetch(&chart(&url, "1.0.0")).await;
        assert_eq!(fetched.is_ok(), succeeds, "{source}");
        assert_eq!(*hub.0.lock().unwrap(), hub_calls, "{source}");
        let direct_requests = usize::from(source != ChartSource::Hub);
        assert_eq!(
            site.take_authorizations().len(),
            direct_requests,
            "{source}"
        );
    }
}
