use std::sync::atomic::Ordering;

use futures::future::join_all;
use krypton_types::error_chain::chain;
use krypton_types::fingerprint::sha256_hex;
use proptest::prelude::*;
use tokio::net::{TcpListener, TcpSocket};

use super::archive::tests::{chart_yaml, entry, file, packed};
use super::stub_site::{StubFallback, StubResponse, StubSite, cache, chart, small};
use super::*;

/// A running repository with the chart `small`.
struct Repository {
    url: String,
    site: StubSite,
}

impl Repository {
    /// Starts a repository with an index that lists `chart` once for each version, and with the archives.
    async fn with_versions(versions: &[&str]) -> Self {
        let site = StubSite::default();
        let mut index = String::from("apiVersion: v1\nentries:\n  small:\n");
        for version in versions {
            let tgz = small(version);
            let digest = sha256_hex(&tgz);
            index.push_str(&format!(
                "    - {{version: {version}, urls: [small-{version}.tgz], digest: {digest}}}\n"
            ));
            site.serve(&format!("/small-{version}.tgz"), tgz);
        }
        site.serve("/index.yaml", index);
        let url = site.clone().start().await;
        Self { url, site }
    }

    fn chart(&self, version: &str) -> ChartRef {
        chart(&self.url, version)
    }
}

#[tokio::test]
async fn fetched_chart_is_verified_and_cached_by_digest() {
    let repository = Repository::with_versions(&["1.0.0", "1.1.0"]).await;
    let (_dir, cache) = cache();
    let fetched = cache.fetch(&repository.chart("1.0.0")).await.unwrap();
    assert_eq!(fetched.name, "small");
    assert_eq!(fetched.version, "1.0.0");
    assert_eq!(std::fs::read(&fetched.path).unwrap(), small("1.0.0"));
    let file_name = format!("{}.tgz", fetched.sha256);
    assert_eq!(fetched.path.file_name().unwrap(), &*file_name);
    let again = cache.fetch(&repository.chart("1.0.0")).await.unwrap();
    assert_eq!(again, fetched);
    assert_eq!(repository.site.all_hits(), 2);
}

#[tokio::test]
async fn a_leading_v_makes_no_difference() {
    let repository = Repository::with_versions(&["v1.19.1"]).await;
    let (_dir, cache) = cache();
    let fetched = cache.fetch(&repository.chart("1.19.1")).await.unwrap();
    assert_eq!(fetched.version, "v1.19.1");
}

#[tokio::test]
async fn newest_version_is_kept_once_resolved() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let (_dir, cache) = cache();
    let first = cache.fetch(&repository.chart("")).await.unwrap();
    let newer = Repository::with_versions(&["1.0.0", "2.0.0"]).await;
    let index = newer.site.response("/index.yaml");
    repository.site.respond("/index.yaml", index);
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
    assert_eq!(error.reason(), "VersionNotFound");
    let expected = format!(
        "chart version not found in repository: chart small, version 9.9.9, of {}; \
         the newest stable version is 1.1.0",
        repository.url
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
    assert_eq!(repository.site.hits("/small-1.0.0.tgz"), 1);
    // Replace the content under the same version.
    let other = packed(&[chart_yaml("small", "1.0.0"), file("small/a", "b")]);
    repository.site.serve("/small-1.0.0.tgz", other);
    let index = "entries: {small: [{version: 1.0.0, urls: [small-1.0.0.tgz]}]}";
    repository.site.serve("/index.yaml", index);
    let (_dir, fresh) = self::cache();
    let error = fresh.fetch(&repository.chart(&version)).await.unwrap_err();
    assert!(
        matches!(error.problem, ChartProblem::Digest { .. }),
        "{error}"
    );
}

#[tokio::test]
async fn invalid_version_is_rejected_and_range_not_fetched() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let (_dir, cache) = cache();
    for version in ["latest", "1.0.0\n", "1.0.0@sha256:12"] {
        let error = cache.fetch(&repository.chart(version)).await.unwrap_err();
        assert_eq!(error.reason(), "VersionInvalid", "{version}");
    }
    assert_eq!(repository.site.all_hits(), 0);
    // Only the hub resolves ranges, once for the whole fleet.
    for range in ["^1", "1.0", "*", "=1.0.0"] {
        let error = cache.fetch(&repository.chart(range)).await.unwrap_err();
        assert!(matches!(error.problem, ChartProblem::Unresolved), "{error}");
    }
    // The error reports the cause.
    let error = cache.fetch(&repository.chart("=9.9.9")).await.unwrap_err();
    assert_eq!(error.reason(), "VersionNotFound");
    assert!(error.to_string().contains("version 9.9.9,"), "{error}");
    let site = &repository.site;
    assert_eq!(site.all_hits(), site.hits("/index.yaml"));
}

#[tokio::test]
async fn broken_repository_answer_is_rejected_with_reason() {
    use StubResponse::{DeclaresLength, Redirect, Status};
    let (_dir, cache) = cache();
    let body = |content: Vec<u8>| StubResponse::Body(content.into());
    let html = || StubResponse::Body("<!doctype html><title>Hello</title>".into());
    let other = packed(&[chart_yaml("other", "1.0.0")]);
    let newer = small("1.0.1");
    let traversal = packed(&[chart_yaml("small", "1.0.0"), file("small/../../x", "x")]);
    let link = packed(&[
        chart_yaml("small", "1.0.0"),
        entry("small/values.yaml", tar::EntryType::Symlink, b""),
    ]);
    // The entry has no digest, so the check of the archive reports the error.
    let index = "entries: {small: [{version: 1.0.0, urls: [small-1.0.0.tgz]}]}";
    let (of_index, of_chart) = ("/index.yaml", "/small-1.0.0.tgz");
    let redirect = Redirect(of_index.to_owned());
    let cases: Vec<(&str, StubResponse, &str)> = vec![
        (of_index, html(), "not the index"),
        (of_index, Status(404), "returned 404"),
        (of_index, Status(503), "returned 503"),
        (of_index, redirect, "more than 5 redirects"),
        (of_index, DeclaresLength(200 << 20), "larger than 50 MiB"),
        (of_chart, Status(404), "downloading the chart returned 404"),
        (of_chart, DeclaresLength(11 << 20), "larger than 10 MiB"),
        (of_chart, html(), "not a gzip"),
        (of_chart, body(other), "holds chart other 1.0.0"),
        (of_chart, body(newer), "holds chart small 1.0.1"),
        (of_chart, body(traversal), "leaves the chart's folder"),
        (of_chart, body(link), "neither a file nor a folder"),
    ];
    for (path, response, reason) in cases {
        let repository = Repository::with_versions(&["1.0.0"]).await;
        repository.site.serve("/index.yaml", index);
        repository.site.respond(path, response);
        let error = cache.fetch(&repository.chart("1.0.0")).await.unwrap_err();
        let text = chain(&error);
        let chart = "chart small, version 1.0.0, of http://127.0.0.1";
        for expected in [reason, chart] {
            assert!(text.contains(expected), "{path}: {text}");
        }
        assert_eq!(error.reason(), "ChartNotLoaded");
    }
    let remaining = std::fs::read_dir(&cache.dir).unwrap().count();
    assert_eq!(remaining, 0, "nothing that was refused is kept");
}

#[tokio::test]
async fn endless_index_download_is_cut_off() {
    let site = StubSite::default();
    site.respond("/index.yaml", StubResponse::Endless);
    let url = site.clone().start().await;
    let (_dir, cache) = cache();
    let error = cache.fetch(&chart(&url, "1.0.0")).await.unwrap_err();
    assert!(
        matches!(error.problem, ChartProblem::TooLarge { .. }),
        "{error}"
    );
    let sent = site.sent.load(Ordering::Relaxed);
    assert!(sent < index::LIMIT + (32 << 20), "{sent} bytes were taken");
}

#[tokio::test]
async fn chart_with_wrong_digest_is_rejected() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let other = packed(&[chart_yaml("small", "1.0.0")]);
    repository.site.serve("/small-1.0.0.tgz", other);
    let (_dir, cache) = cache();
    let error = cache.fetch(&repository.chart("1.0.0")).await.unwrap_err();
    assert!(
        matches!(error.problem, ChartProblem::Digest { .. }),
        "{error}"
    );
}

#[tokio::test]
async fn many_callers_share_one_fetch() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let (_dir, cache) = cache();
    let chart = repository.chart("1.0.0");
    let results = join_all((0..50).map(|_| cache.fetch(&chart))).await;
    assert!(results.iter().all(Result::is_ok));
    let hits = ["/index.yaml", "/small-1.0.0.tgz"].map(|path| repository.site.hits(path));
    assert_eq!(hits, [1, 1]);
}

#[tokio::test]
async fn fetch_failure_is_shared_until_back_off_ends() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let index = repository.site.response("/index.yaml");
    let broken = StubResponse::Status(500);
    repository.site.respond("/index.yaml", broken);
    let (_dir, cache) = cache();
    let chart = repository.chart("1.0.0");
    let results = join_all((0..50).map(|_| cache.fetch(&chart))).await;
    assert!(results.iter().all(Result::is_err));
    assert_eq!(repository.site.all_hits(), 1);

    repository.site.respond("/index.yaml", index);
    assert!(cache.fetch(&chart).await.is_err());
    assert_eq!(repository.site.all_hits(), 1);

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
    let url = format!("http://{}", silent.local_addr().unwrap());
    let unresponsive = chart(&url, "1.0.0");
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
    let chart = chart(&format!("http://me:hunter2@{address}"), "1.0.0");
    let error = cache.fetch(&chart).await.unwrap_err();
    let text = chain(&error);
    let start = "chart not loaded; repo unreachable?";
    assert!(text.starts_with(start), "{text}");
    let all = format!("{text}{error:?}{chart:?}");
    assert!(!all.contains("hunter2"), "{all}");
}

#[tokio::test]
async fn other_addresses_are_refused_with_the_remedy() {
    let (_dir, cache) = cache();
    let (case, scheme) = ("in lower case", "must be an http(s) or oci URL");
    for (repo, name, reason) in [
        ("oci://registry.example.org/Charts", "small", case),
        ("", "oci://registry.example.org", case),
        ("file:///srv/charts", "small", scheme),
        ("charts.example.org", "small", scheme),
        ("", "small", scheme),
    ] {
        let chart = ChartRef {
            name: name.to_owned(),
            ..chart(repo, "1.0.0")
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
        name: path.to_str().unwrap().to_owned(),
        ..chart("", version)
    };
    for version in ["", "1.0.0", "v1.0.0"] {
        let fetched = cache.fetch(&chart(version)).await.unwrap();
        assert_eq!(fetched.name, "small");
        assert_eq!(fetched.version, "1.0.0");
    }
    let error = cache.fetch(&chart("1.0.1")).await.unwrap_err();
    assert_eq!(error.reason(), "VersionNotFound");

    std::fs::write(&path, b"rubbish").unwrap();
    let error = cache.fetch(&chart("1.0.2")).await.unwrap_err();
    assert!(matches!(error.problem, ChartProblem::Archive(_)), "{error}");

    let missing_file = ChartRef {
        name: "/nowhere/small.tgz".to_owned(),
        ..chart("1.0.0")
    };
    let error = cache.fetch(&missing_file).await.unwrap_err();
    assert!(matches!(error.problem, ChartProblem::Local(_)), "{error}");
}

#[tokio::test]
async fn fallback_is_used_only_when_repository_is_unavailable() {
    let repository = Repository::with_versions(&["1.0.0"]).await;
    let unreachable = chart("http://127.0.0.1:1", "1.0.0");
    let missing_file = ChartRef {
        name: "/nowhere/small.tgz".to_owned(),
        ..chart("", "1.0.0")
    };
    let not_found = chart(&format!("{}/other", repository.url), "1.0.0");
    let available = repository.chart("1.0.0");
    let unlisted = ChartRef {
        name: "large".to_owned(),
        ..available.clone()
    };
    let (good, none) = (Some(("small", "1.0.0")), None);
    let (large, newer) = (Some(("large", "1.0.0")), Some(("small", "2.0.0")));
    for (chart, fallback_chart, calls, expected) in [
        (&available, good, 0, "1.0.0"),
        (&unlisted, good, 0, "no such chart"),
        (&repository.chart("1.0.1"), good, 0, "not found"),
        (&unreachable, good, 1, "1.0.0"),
        (&missing_file, good, 1, "1.0.0"),
        (&not_found, good, 1, "1.0.0"),
        (&unreachable, none, 1, "repo unreachable?"),
        (&unreachable, large, 1, "holds chart large"),
        (&unreachable, newer, 1, "newest stable version is 2.0.0"),
    ] {
        let fallback = Arc::new(StubFallback {
            chart: fallback_chart,
            ..StubFallback::default()
        });
        let (_dir, cache) = cache();
        let shared = Arc::clone(&fallback) as Arc<dyn Fallback>;
        let cache = cache.with_fallback(shared, ChartSource::Auto);
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
    let error = ChartCache::new(file.clone()).unwrap_err().to_string();
    assert!(error.contains(file.to_str().unwrap()), "{error}");

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
