use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::join_all;
use proptest::prelude::*;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::archive::tests::{chart_yaml, entry, file, packed};
use super::*;

/// Response of the server for one path.
#[derive(Clone)]
enum StubResponse {
    Body(Vec<u8>),
    Status(u16),
    Redirect(String),
    /// An infinite body without a `Content-Length`.
    Endless,
    /// Declares a length and sends no body.
    DeclaresLength(u64),
}

/// A chart repository on the loopback interface.
struct Repository {
    address: SocketAddr,
    responses: Arc<Mutex<BTreeMap<String, StubResponse>>>,
    hits: Arc<Mutex<BTreeMap<String, u64>>>,
    sent: Arc<AtomicU64>,
}

impl Repository {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let repository = Self {
            address: listener.local_addr().unwrap(),
            responses: Arc::default(),
            hits: Arc::default(),
            sent: Arc::default(),
        };
        let (responses, hits) = (
            Arc::clone(&repository.responses),
            Arc::clone(&repository.hits),
        );
        let sent = Arc::clone(&repository.sent);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (responses, hits) = (Arc::clone(&responses), Arc::clone(&hits));
                tokio::spawn(serve(stream, responses, hits, Arc::clone(&sent)));
            }
        });
        repository
    }

    /// Starts a repository with an index that lists `chart` once for each version, and with the archives.
    async fn with_versions(versions: &[&str]) -> Self {
        let repository = Self::start().await;
        let mut index = String::from("apiVersion: v1\nentries:\n  small:\n");
        for version in versions {
            let tgz = small(version);
            let digest = krypton_types::fingerprint::sha256_hex(&tgz);
            index.push_str(&format!(
                "    - {{version: {version}, urls: [small-{version}.tgz], digest: {digest}}}\n"
            ));
            repository.respond(&format!("/small-{version}.tgz"), StubResponse::Body(tgz));
        }
        repository.respond("/index.yaml", StubResponse::Body(index.into_bytes()));
        repository
    }

    fn respond(&self, path: &str, response: StubResponse) {
        self.responses
            .lock()
            .unwrap()
            .insert(path.to_owned(), response);
    }

    fn hits(&self, path: &str) -> u64 {
        self.hits.lock().unwrap().get(path).copied().unwrap_or(0)
    }

    fn all_hits(&self) -> u64 {
        self.hits.lock().unwrap().values().sum()
    }

    fn chart(&self, version: &str) -> ChartRef {
        ChartRef {
            repo: format!("http://{}", self.address),
            name: "small".to_owned(),
            version: version.to_owned(),
        }
    }
}

async fn serve(
    mut stream: TcpStream,
    responses: Arc<Mutex<BTreeMap<String, StubResponse>>>,
    hits: Arc<Mutex<BTreeMap<String, u64>>>,
    sent: Arc<AtomicU64>,
) -> Option<()> {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        request.push(stream.read_u8().await.ok()?);
    }
    let request = String::from_utf8(request).unwrap();
    let path = request.split(' ').nth(1).unwrap().to_owned();
    *hits.lock().unwrap().entry(path.clone()).or_default() += 1;
    let response = responses
        .lock()
        .unwrap()
        .get(&path)
        .cloned()
        .unwrap_or(StubResponse::Status(404));
    let head = |status: u16, headers: String| {
        format!("HTTP/1.1 {status} -\r\nconnection: close\r\n{headers}\r\n").into_bytes()
    };
    match response {
        StubResponse::Body(body) => {
            let length = format!("content-length: {}\r\n", body.len());
            stream.write_all(&head(200, length)).await.ok()?;
            stream.write_all(&body).await.ok()?;
        }
        StubResponse::Status(status) => {
            stream
                .write_all(&head(status, "content-length: 0\r\n".to_owned()))
                .await
                .ok()?;
        }
        StubResponse::Redirect(to) => {
            let headers = format!("location: {to}\r\ncontent-length: 0\r\n");
            stream.write_all(&head(302, headers)).await.ok()?;
        }
        StubResponse::Endless => {
            stream.write_all(&head(200, String::new())).await.ok()?;
            let block = vec![b'a'; 1 << 20];
            while stream.write_all(&block).await.is_ok() {
                sent.fetch_add(1 << 20, Ordering::Relaxed);
            }
        }
        StubResponse::DeclaresLength(length) => {
            stream
                .write_all(&head(200, format!("content-length: {length}\r\n")))
                .await
                .ok()?;
            stream.read_u8().await.ok()?;
        }
    }
    stream.shutdown().await.ok()
}

fn small(version: &str) -> Vec<u8> {
    packed(&[
        chart_yaml("small", version),
        file("small/values.yaml", "a: 1\n"),
    ])
}

fn cache() -> (TempDir, ChartCache) {
    // Another test may have installed the provider already.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let dir = tempfile::tempdir().unwrap();
    let cache = ChartCache::new(dir.path().join("charts")).unwrap();
    (dir, cache)
}

#[tokio::test]
async fn fetched_chart_is_verified_and_cached_by_digest() {
    let repository = Repository::with_versions(&["1.0.0", "1.1.0"]).await;
    let (_dir, cache) = cache();
    let fetched = cache.fetch(&repository.chart("1.0.0")).await.unwrap();
    assert_eq!(
        (fetched.name.as_str(), fetched.version.as_str()),
        ("small", "1.0.0")
    );
    assert_eq!(std::fs::read(&fetched.path).unwrap(), small("1.0.0"));
    assert_eq!(
        fetched.path.file_name().unwrap().to_str().unwrap(),
        format!("{}.tgz", fetched.sha256)
    );
    assert_eq!(
        cache.fetch(&repository.chart("1.0.0")).await.unwrap(),
        fetched
    );
    assert_eq!(repository.all_hits(), 2);
}

#[tokio::test]
async fn a_leading_v_makes_no_difference() {
    let repository = Repository::with_versions(&["v1.19.1"]).await;
    let (_dir, cache) = cache();
    assert_eq!(
        cache
            .fetch(&repository.chart("1.19.1"))
            .await
            .unwrap()
            .version,
        "v1.19.1"
    );
}

#[tokio::test]
async fn newest_version_is_kept_once_resolved() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let (_dir, cache) = cache();
    let first = cache.fetch(&repository.chart("")).await.unwrap();
    let newer = Repository::with_versions(&["1.0.0", "2.0.0"]).await;
    let index = newer.responses.lock().unwrap()["/index.yaml"].clone();
    repository.respond("/index.yaml", index);
    assert_eq!(cache.fetch(&repository.chart("")).await.unwrap(), first);
    std::fs::remove_file(&first.path).unwrap();
    assert_eq!(cache.fetch(&repository.chart("")).await.unwrap(), first);
    assert!(first.path.exists());
}

#[tokio::test]
async fn missing_version_error_names_newest_version() {
    let repository = Repository::with_versions(&["1.0.0", "1.1.0"]).await;
    let (_dir, cache) = cache();
    let error = cache.fetch(&repository.chart("9.9.9")).await.unwrap_err();
    assert_eq!(error.fault(), ChartFault::VersionNotFound);
    let expected = format!(
        "chart version not found in repository: chart small, version 9.9.9, of http://{}; \
         the newest stable version is 1.1.0",
        repository.address
    );
    assert_eq!(error.to_string(), expected);
}

#[tokio::test]
async fn pinned_chart_is_fetched_once() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let (_dir, cache) = cache();
    let version = cache.pin(&repository.chart("1.0.0")).await.unwrap();
    let fetched = cache.fetch(&repository.chart(&version)).await.unwrap();
    assert_eq!(version, format!("1.0.0@sha256:{}", fetched.sha256));
    assert_eq!(repository.hits("/small-1.0.0.tgz"), 1);
    // Replace the content under the same version.
    let other = packed(&[chart_yaml("small", "1.0.0"), file("small/a", "b")]);
    repository.respond("/small-1.0.0.tgz", StubResponse::Body(other));
    repository.respond(
        "/index.yaml",
        StubResponse::Body(
            b"entries: {small: [{version: 1.0.0, urls: [small-1.0.0.tgz]}]}".to_vec(),
        ),
    );
    let (_dir, fresh) = self::cache();
    let error = fresh.fetch(&repository.chart(&version)).await.unwrap_err();
    assert!(matches!(*error, ChartError::Digest { .. }), "{error}");
}

#[tokio::test]
async fn invalid_version_is_rejected_and_range_not_fetched() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let (_dir, cache) = cache();
    for version in ["latest", "1.0.0\n", "1.0.0@sha256:12"] {
        let error = cache.fetch(&repository.chart(version)).await.unwrap_err();
        assert_eq!(error.fault(), ChartFault::VersionInvalid, "{version}");
    }
    assert_eq!(repository.all_hits(), 0);
    // Only the hub resolves ranges, once for the whole fleet.
    for range in ["^1", "1.0", "*", "=1.0.0"] {
        let error = cache.fetch(&repository.chart(range)).await.unwrap_err();
        assert!(matches!(*error, ChartError::Unresolved { .. }), "{error}");
    }
    // The error reports the cause.
    let error = cache.fetch(&repository.chart("=9.9.9")).await.unwrap_err();
    assert_eq!(error.fault(), ChartFault::VersionNotFound);
    assert_eq!(repository.all_hits(), repository.hits("/index.yaml"));
}

#[tokio::test]
async fn broken_repository_answer_is_rejected_with_reason() {
    let (_dir, cache) = cache();
    let html = || StubResponse::Body(b"<!doctype html><title>Hello</title>".to_vec());
    let other = packed(&[chart_yaml("other", "1.0.0")]);
    let newer = small("1.0.1");
    let traversal = packed(&[chart_yaml("small", "1.0.0"), file("small/../../x", "x")]);
    let link = packed(&[
        chart_yaml("small", "1.0.0"),
        entry("small/values.yaml", tar::EntryType::Symlink, b""),
    ]);
    // The entry has no digest, so the check of the archive reports the error.
    let index = b"entries: {small: [{version: 1.0.0, urls: [small-1.0.0.tgz]}]}".to_vec();
    let cases: Vec<(&str, StubResponse, &str)> = vec![
        ("/index.yaml", html(), "not the index"),
        ("/index.yaml", StubResponse::Status(404), "returned 404"),
        ("/index.yaml", StubResponse::Status(503), "returned 503"),
        (
            "/index.yaml",
            StubResponse::Redirect("/index.yaml".to_owned()),
            "more than 5 redirects",
        ),
        (
            "/index.yaml",
            StubResponse::DeclaresLength(200 << 20),
            "larger than 50 MiB",
        ),
        (
            "/small-1.0.0.tgz",
            StubResponse::Status(404),
            "downloading the chart returned 404",
        ),
        (
            "/small-1.0.0.tgz",
            StubResponse::DeclaresLength(11 << 20),
            "larger than 10 MiB",
        ),
        ("/small-1.0.0.tgz", html(), "not a gzip"),
        (
            "/small-1.0.0.tgz",
            StubResponse::Body(other),
            "holds chart other 1.0.0",
        ),
        (
            "/small-1.0.0.tgz",
            StubResponse::Body(newer),
            "holds chart small 1.0.1",
        ),
        (
            "/small-1.0.0.tgz",
            StubResponse::Body(traversal),
            "leaves the chart's folder",
        ),
        (
            "/small-1.0.0.tgz",
            StubResponse::Body(link),
            "neither a file nor a folder",
        ),
    ];
    for (path, response, reason) in cases {
        let repository = Repository::with_versions(&["1.0.0"]).await;
        repository.respond("/index.yaml", StubResponse::Body(index.clone()));
        repository.respond(path, response);
        let error = cache.fetch(&repository.chart("1.0.0")).await.unwrap_err();
        let text = chain(&error);
        assert!(text.contains(reason), "{path}: {text}");
        assert!(
            text.contains("chart small, version 1.0.0, of http://127.0.0.1"),
            "{text}"
        );
        assert_eq!(error.fault(), ChartFault::NotLoaded);
    }
    let remaining = std::fs::read_dir(&cache.dir).unwrap().count();
    assert_eq!(remaining, 0, "nothing that was refused is kept");
}

#[tokio::test]
async fn endless_index_download_is_cut_off() {
    let repository = Repository::start().await;
    repository.respond("/index.yaml", StubResponse::Endless);
    let (_dir, cache) = cache();
    let error = cache.fetch(&repository.chart("1.0.0")).await.unwrap_err();
    assert!(matches!(*error, ChartError::TooLarge { .. }), "{error}");
    let sent = repository.sent.load(Ordering::Relaxed);
    assert!(sent < index::LIMIT + (32 << 20), "{sent} bytes were taken");
}

#[tokio::test]
async fn chart_with_wrong_digest_is_rejected() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    repository.respond(
        "/small-1.0.0.tgz",
        StubResponse::Body(packed(&[chart_yaml("small", "1.0.0")])),
    );
    let (_dir, cache) = cache();
    let error = cache.fetch(&repository.chart("1.0.0")).await.unwrap_err();
    assert!(matches!(*error, ChartError::Digest { .. }), "{error}");
}

#[tokio::test]
async fn many_callers_share_one_fetch() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let (_dir, cache) = cache();
    let chart = repository.chart("1.0.0");
    let results = join_all((0..50).map(|_| cache.fetch(&chart))).await;
    assert!(results.iter().all(Result::is_ok));
    assert_eq!(
        (
            repository.hits("/index.yaml"),
            repository.hits("/small-1.0.0.tgz")
        ),
        (1, 1)
    );
}

#[tokio::test]
async fn fetch_failure_is_shared_until_back_off_ends() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let index = repository.responses.lock().unwrap()["/index.yaml"].clone();
    repository.respond("/index.yaml", StubResponse::Status(500));
    let (_dir, cache) = cache();
    let chart = repository.chart("1.0.0");
    let results = join_all((0..50).map(|_| cache.fetch(&chart))).await;
    assert!(results.iter().all(Result::is_err));
    assert_eq!(repository.all_hits(), 1);

    repository.respond("/index.yaml", index);
    assert!(cache.fetch(&chart).await.is_err());
    assert_eq!(repository.all_hits(), 1);

    let entry = cache.entry(&chart);
    match &mut *entry.lock().await {
        EntryState::Failed {
            until, times: 1, ..
        } => *until = BootTime::default(),
        other => panic!("the failure is not remembered: {other:?}"),
    }
    assert_eq!(cache.fetch(&chart).await.unwrap().version, "1.0.0");
}

#[tokio::test]
async fn one_dead_repository_does_not_hold_up_another() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let unresponsive = ChartRef {
        repo: format!("http://{}", silent.local_addr().unwrap()),
        ..repository.chart("1.0.0")
    };
    let (_dir, cache) = cache();
    let mut waiting = std::pin::pin!(cache.fetch(&unresponsive));
    assert!(futures::poll!(waiting.as_mut()).is_pending());
    let (_connection, _) = silent.accept().await.unwrap();
    assert!(cache.fetch(&repository.chart("1.0.0")).await.is_ok());
    assert!(futures::poll!(waiting).is_pending());
}

#[tokio::test]
async fn unreachable_repository_error_hides_password() {
    // A bound socket without a listener reserves the port, so no other test can use it.
    let silent = TcpSocket::new_v4().unwrap();
    silent.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = silent.local_addr().unwrap();
    let (_dir, cache) = cache();
    let chart = ChartRef {
        repo: format!("http://me:hunter2@{address}"),
        name: "small".to_owned(),
        version: "1.0.0".to_owned(),
    };
    let error = cache.fetch(&chart).await.unwrap_err();
    let text = chain(&error);
    assert!(
        text.starts_with("chart not loaded; repo unreachable?"),
        "{text}"
    );
    assert!(
        !text.contains("hunter2") && !format!("{error:?}{chart:?}").contains("hunter2"),
        "{error:?}"
    );
}

#[tokio::test]
async fn other_addresses_are_refused_with_the_remedy() {
    let (_dir, cache) = cache();
    for (repo, name, reason) in [
        (
            "oci://registry.example.org/Charts",
            "small",
            "in lower case",
        ),
        ("", "oci://registry.example.org", "in lower case"),
        (
            "file:///srv/charts",
            "small",
            "must be an http(s) or oci URL",
        ),
        (
            "charts.example.org",
            "small",
            "must be an http(s) or oci URL",
        ),
        ("", "small", "must be an http(s) or oci URL"),
    ] {
        let chart = ChartRef {
            repo: repo.to_owned(),
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
        };
        let error = cache.fetch(&chart).await.unwrap_err();
        assert!(error.to_string().contains(reason), "{repo}: {error}");
    }
}

#[tokio::test]
async fn a_local_chart_is_checked_like_any_other() {
    let (dir, cache) = cache();
    let path = dir.path().join("any-name.tgz");
    std::fs::write(&path, small("1.0.0")).unwrap();
    let chart = |version: &str| ChartRef {
        repo: String::new(),
        name: path.to_str().unwrap().to_owned(),
        version: version.to_owned(),
    };
    for version in ["", "1.0.0", "v1.0.0"] {
        let fetched = cache.fetch(&chart(version)).await.unwrap();
        assert_eq!(
            (fetched.name.as_str(), fetched.version.as_str()),
            ("small", "1.0.0")
        );
    }
    let error = cache.fetch(&chart("1.0.1")).await.unwrap_err();
    assert_eq!(error.fault(), ChartFault::VersionNotFound);

    std::fs::write(&path, b"rubbish").unwrap();
    let error = cache.fetch(&chart("1.0.2")).await.unwrap_err();
    assert!(matches!(*error, ChartError::Archive { .. }), "{error}");

    let missing_file = ChartRef {
        name: "/nowhere/small.tgz".to_owned(),
        ..chart("1.0.0")
    };
    let error = cache.fetch(&missing_file).await.unwrap_err();
    assert!(matches!(*error, ChartError::Local { .. }), "{error}");
}

/// A fallback that counts its calls and returns a chart of that name and version, or an error.
#[derive(Default)]
struct StubFallback {
    chart: Option<(&'static str, &'static str)>,
    calls: AtomicU64,
}

impl Fallback for StubFallback {
    fn fetch(&self, _: &ChartRef) -> BoxFuture<'_, Result<Vec<u8>, String>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Box::pin(async {
            let (name, version) = self.chart.ok_or("it has none")?;
            Ok(packed(&[chart_yaml(name, version)]))
        })
    }
}

#[tokio::test]
async fn fallback_is_used_only_when_repository_is_unavailable() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let unreachable = ChartRef {
        repo: "http://127.0.0.1:1".to_owned(),
        ..repository.chart("1.0.0")
    };
    let missing_file = ChartRef {
        repo: String::new(),
        name: "/nowhere/small.tgz".to_owned(),
        version: "1.0.0".to_owned(),
    };
    let not_found = ChartRef {
        repo: format!("http://{}/other", repository.address),
        ..unreachable.clone()
    };
    let available = repository.chart("1.0.0");
    let unlisted = ChartRef {
        name: "large".to_owned(),
        ..available.clone()
    };
    let (good, none) = (Some(("small", "1.0.0")), None);
    for (chart, fallback_chart, calls, expected) in [
        (&available, good, 0, "1.0.0"),
        (&unlisted, good, 0, "no such chart"),
        (&repository.chart("1.0.1"), good, 0, "not found"),
        (&unreachable, good, 1, "1.0.0"),
        (&missing_file, good, 1, "1.0.0"),
        (&not_found, good, 1, "1.0.0"),
        (&unreachable, none, 1, "repo unreachable?"),
        (
            &unreachable,
            Some(("large", "1.0.0")),
            1,
            "holds chart large",
        ),
        (
            &unreachable,
            Some(("small", "2.0.0")),
            1,
            "newest stable version is 2.0.0",
        ),
    ] {
        let fallback = Arc::new(StubFallback {
            chart: fallback_chart,
            ..StubFallback::default()
        });
        let (_dir, cache) = cache();
        let cache = cache.with_fallback(
            Arc::clone(&fallback) as Arc<dyn Fallback>,
            ChartSource::Auto,
        );
        let outcome = match cache.fetch(chart).await {
            Ok(fetched) => fetched.version,
            Err(error) => error.to_string(),
        };
        assert!(outcome.contains(expected), "{chart}: {outcome}");
        assert_eq!(fallback.calls.load(Ordering::Relaxed), calls, "{chart}");
    }
}

#[test]
fn unusable_cache_folder_is_named_and_leftovers_removed() {
    let (dir, _) = cache();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = ChartCache::new(file.clone()).unwrap_err();
    assert!(
        error.to_string().contains(file.to_str().unwrap()),
        "{error}"
    );

    let folder = dir.path().join("charts");
    let leftover = folder.join(format!("{PARTIAL}old"));
    std::fs::write(&leftover, "").unwrap();
    ChartCache::new(folder).unwrap();
    assert!(!leftover.exists());
}

proptest! {
    #[test]
    fn back_off_grows_to_limit_with_jitter(failures in any::<u32>(), random in 0.0..1.0) {
        let chosen = backoff(failures, random);
        prop_assert!(chosen >= Duration::from_secs(1) && chosen <= MAX_BACKOFF);
        prop_assert!(backoff(failures, 0.0) <= chosen && chosen <= backoff(failures, 1.0));
        prop_assert!(backoff(failures, 0.0) < backoff(failures, 1.0));
        prop_assert!(failures < 5 || chosen >= MAX_BACKOFF / 2);
    }
}

fn chain(error: &ChartError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}
