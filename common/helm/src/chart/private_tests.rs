//! Tests of repositories that require authentication, compress their index, or use `ETag`.

use std::sync::atomic::Ordering;

use tokio::net::TcpListener;

use super::credentials::tests::secret;
use super::stub_site::{StubFallback, StubResponse, StubSite, cache, chart, small};
use super::*;

fn index(version: &str, url: &str) -> String {
    format!("entries: {{small: [{{version: {version}, urls: ['{url}']}}]}}")
}

fn gzipped(text: &str) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut gzip, text.as_bytes()).unwrap();
    gzip.finish().unwrap()
}

fn credentials(data: &[(&str, &str)]) -> CurrentCredentials {
    Ok(Arc::new(Credentials::from_secret(&secret(data)).unwrap()))
}

fn site_with_login() -> StubSite {
    StubSite {
        requires_login: true,
        ..StubSite::default()
    }
}

fn site_with_tag() -> StubSite {
    StubSite {
        tag: Some("\"one\""),
        ..StubSite::default()
    }
}

const LOGIN: [(&str, &str); 2] = [("username", "me"), ("password", "hunter2")];
const LOGIN_HEADER: &str = "Basic bWU6aHVudGVyMg==";

#[tokio::test]
async fn unchanged_index_is_not_downloaded_again() {
    let site = site_with_tag()
        .with("/index.yaml", index("1.0.0", "a.tgz"))
        .with("/a.tgz", small("1.0.0"));
    let url = site.clone().start().await;
    let (_dir, cache) = cache();
    assert_eq!(cache.resolve(&chart(&url, "^1")).await.unwrap(), "1.0.0");
    // The tag has not changed, so the cached index is still used.
    site.serve("/index.yaml", index("1.1.0", "a.tgz"));
    assert_eq!(cache.resolve(&chart(&url, "^1")).await.unwrap(), "1.0.0");
    assert!(cache.fetch(&chart(&url, "1.0.0")).await.is_ok());

    // A damaged cached index is downloaded again.
    let index_files = std::fs::read_dir(&cache.dir).unwrap();
    let index_files = index_files.map(|entry| entry.unwrap().path());
    let is_index = |path: &PathBuf| path.extension().is_some_and(|found| found == "yaml");
    let index_files: Vec<_> = index_files.filter(is_index).collect();
    assert_eq!(index_files.len(), 1);
    std::fs::write(&index_files[0], "rubbish").unwrap();
    assert_eq!(cache.resolve(&chart(&url, "^1")).await.unwrap(), "1.1.0");
}

#[tokio::test]
async fn indexes_of_replaced_repositories_are_deleted() {
    let (_dir, cache) = cache();
    for _ in 0..8 {
        let site = site_with_tag().with("/index.yaml", index("1.0.0", "a.tgz"));
        let url = site.start().await;
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
        .with("/a.tgz", small("1.0.0"))
        .with("/c.tgz", small("1.2.0"));
    let other = elsewhere.clone().start().await;
    let site = site_with_login();
    let url = site.clone().start().await;
    let (_dir, cache) = cache();
    let (sender, current) = watch::channel(Err("they have not been read yet".into()));
    let cache = cache.with_credentials(current);

    let error = cache.resolve(&chart(&url, "^1")).await.unwrap_err();
    assert!(error.to_string().ends_with("not been read yet"), "{error}");
    assert!(site.take_requests().is_empty());
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
        site.serve("/index.yaml", index("1.0.0", &url_of_chart));
        site.serve("/own.tgz", small("1.0.0"));
        if let Some(to) = to {
            site.respond(&url_of_chart, StubResponse::Redirect(to));
        }
        let cache = &cache;
        cache.entries.lock().clear();
        cache.fetch(&chart(&url, "1.0.0")).await.unwrap();
        for (path, header) in site.take_requests() {
            assert_eq!(header, LOGIN_HEADER, "{path}");
        }
        let others = elsewhere.take_requests();
        assert_eq!(others.len(), usize::from(is_elsewhere), "{others:?}");
        for (path, header) in others {
            assert_eq!(header, "", "{path}");
        }
    }

    // Another host redirects back to the own host: the credentials are not sent again.
    let back = StubResponse::Redirect(format!("{url}/own.tgz"));
    elsewhere.respond("/back.tgz", back);
    let away = StubResponse::Redirect(format!("{other}/back.tgz"));
    site.respond("/away.tgz", away);
    site.serve("/index.yaml", index("1.0.0", "/away.tgz"));
    cache.entries.lock().clear();
    let error = cache.fetch(&chart(&url, "1.0.0")).await.unwrap_err();
    assert!(error.to_string().contains("returned 401"), "{error}");
    assert!(!format!("{error}{error:?}{cache:?}").contains("hunter2"));
}

#[tokio::test]
async fn new_credentials_are_tried_immediately() {
    let site = site_with_login()
        .with("/index.yaml", index("1.0.0", "a.tgz"))
        .with("/a.tgz", small("1.0.0"));
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
    assert!(matches!(error.problem, ChartProblem::PlainHttp), "{error}");
    assert!(error.to_string().contains("--insecure-chart-http"));
}

#[tokio::test]
async fn pinned_digest_is_checked_against_chart_archive() {
    let site = StubSite::default()
        .with("/index.yaml", index("1.0.0", "a.tgz"))
        .with("/a.tgz", small("1.0.0"));
    let url = site.start().await;
    let sha256 = krypton_types::fingerprint::sha256_hex(&small("1.0.0"));
    let (_dir, cache) = cache();
    let fetched = cache
        .fetch(&chart(&url, &format!("1.0.0@sha256:{sha256}")))
        .await
        .unwrap();
    assert_eq!(fetched.sha256, sha256);
    let other = format!("1.0.0@sha256:{}", "0".repeat(64));
    let error = cache.fetch(&chart(&url, &other)).await.unwrap_err();
    assert!(
        matches!(error.problem, ChartProblem::Digest { .. }),
        "{error}"
    );
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
    for (source, succeeds, hub_calls) in [
        (ChartSource::Direct, false, 0),
        (ChartSource::Auto, true, 1),
        (ChartSource::Hub, true, 1),
    ] {
        let site = site_with_login();
        let url = site.clone().start().await;
        let hub = Arc::new(StubFallback {
            chart: Some(("small", "1.0.0")),
            ..StubFallback::default()
        });
        let (_dir, cache) = cache();
        let cache = cache.with_fallback(Arc::clone(&hub) as Arc<dyn Fallback>, source);
        let fetched = cache.fetch(&chart(&url, "1.0.0")).await;
        assert_eq!(fetched.is_ok(), succeeds, "{source}");
        assert_eq!(hub.calls.load(Ordering::Relaxed), hub_calls, "{source}");
        let direct_requests = usize::from(source != ChartSource::Hub);
        assert_eq!(site.all_hits(), direct_requests, "{source}");
    }
}
