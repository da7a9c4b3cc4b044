//! Limits how often watches start, and makes a late start and an early end errors.
//!
//! If a server ends each watch immediately, the client retries a few times per second instead of in a tight
//! loop.
//!
//! The kube crate treats every end of a connection as the regular timeout of a watch, and resumes at the last
//! `resourceVersion`. But an API server also ends its watches when etcd is restored from a backup. The version
//! is then in the future, and the server sends nothing until it is reached. After an error, the caller lists
//! again. A watch also fails if another one ends early between its request and shortly after its start. Its list can be
//! from before the restore, and its request can have reached the server after it.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::BoxFuture;
use http::{Request, Response, Uri};
use hyper::body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::{Instant, Timeout, timeout_at};
use tower::{BoxError, Layer, Service};

use crate::clock::BootTime;

/// Minimum time between the starts of two watches on the same resource.
const START_INTERVAL: Duration = Duration::from_millis(500);

/// A server starts to answer a watch within this time, even if it has no event. An API server needs milliseconds.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// A server may end a watch this much before its timeout, because clocks differ in speed.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(1);
/// Time after the start of a watch in which earlier ends of other watches may still arrive, on other connections.
const LATE_ENDS: Duration = Duration::from_millis(500);

/// Completes with `Ok` if another watch ends early, and with an error after [`LATE_ENDS`].
type OtherEnd = Pin<Box<Timeout<Pin<Box<OwnedNotified>>>>>;

/// State that all requests to one server share.
#[derive(Clone, Debug, Default)]
pub(super) struct WatchLayer {
    /// Time of the next allowed start, by resource.
    next_starts: Arc<Mutex<BTreeMap<String, Instant>>>,
    /// Notifies of each watch that ends early.
    early_ends: Arc<Notify>,
}

impl<S> Layer<S> for WatchLayer {
    type Service = WatchService<S>;

    fn layer(&self, inner: S) -> WatchService<S> {
        WatchService {
            inner,
            layer: self.clone(),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct WatchService<S> {
    inner: S,
    layer: WatchLayer,
}

impl<S, A, B> Service<Request<A>> for WatchService<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
{
    type Response = Response<WatchBody<B>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let early_ends = Arc::clone(&self.layer.early_ends);
        // It notices each end from here on, even before its first poll.
        let start = watch_key(request.uri()).map(|key| {
            let other_end = Arc::clone(&early_ends).notified_owned();
            (self.layer.reserve_start(key), other_end)
        });
        let timeout = timeout(request.uri());
        // The future does nothing before its first poll.
        let response_future = self.inner.call(request);
        Box::pin(async move {
            let (mut regular_end, mut other_end) = (None, None);
            let response = if let Some((start, notified)) = start {
                let mut notified = Box::pin(notified);
                // Immediately, not at its turn: until it fails, the caller decides on its list.
                if timeout_at(start, notified.as_mut()).await.is_ok() {
                    return Err(WatchEndedEarly.into());
                }
                let (started, booted) = (Instant::now(), BootTime::now());
                let head = timeout_at(started + START_TIMEOUT, response_future).await;
                let response = head.map_err(|_| WatchNotStarted)?.map_err(Into::into)?;
                let timeout = timeout.filter(|_| response.status().is_success());
                regular_end = timeout.map(|timeout| RegularEnd {
                    awake: started + timeout,
                    boot: booted + timeout,
                });
                let settled_at = Instant::now() + LATE_ENDS;
                other_end = timeout.map(|_| Box::pin(timeout_at(settled_at, notified)));
                response
            } else {
                response_future.await.map_err(Into::into)?
            };
            Ok(response.map(|inner| WatchBody {
                inner,
                regular_end,
                other_end,
                early_ends,
            }))
        })
    }
}

/// The response to a watch did not start.
#[derive(Clone, Copy, Debug, Error)]
#[error("the API server did not start the watch within {} s", START_TIMEOUT.as_secs())]
struct WatchNotStarted;

/// The connection of a watch ended before the timeout of the watch.
#[derive(Clone, Copy, Debug, Error)]
#[error("the API server or the network ended the watch before its timeout")]
struct WatchEndedEarly;

/// The timeout of a watch.
#[derive(Clone, Copy, Debug)]
struct RegularEnd {
    /// By the clock that stops while the machine is suspended.
    awake: Instant,
    boot: BootTime,
}

impl RegularEnd {
    /// Returns whether a watch that ends now has reached its timeout. After a suspension, only an end at the expected
    /// time counts: during the suspension, the server may have ended the watch early.
    fn is_reached(self, awake: Instant, boot: BootTime) -> bool {
        let is_at_timeout = boot.0.abs_diff(self.boot.0) <= CLOCK_TOLERANCE;
        awake + CLOCK_TOLERANCE >= self.awake || is_at_timeout
    }
}

/// A body that fails if it ends too early.
#[derive(Debug)]
pub(super) struct WatchBody<B> {
    inner: B,
    /// `None` if any end is regular.
    regular_end: Option<RegularEnd>,
    /// `None` once the watch has run for [`LATE_ENDS`].
    other_end: Option<OtherEnd>,
    early_ends: Arc<Notify>,
}

impl<B> Body for WatchBody<B>
where
    B: Body + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        let other_end = self.other_end.as_mut().map(|end| end.as_mut().poll(cx));
        if let Some(Poll::Ready(ended)) = other_end {
            self.other_end = None;
            if ended.is_ok() {
                // The other watch has already notified of its end.
                self.regular_end = None;
                return Poll::Ready(Some(Err(WatchEndedEarly.into())));
            }
        }
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        let is_early = self
            .regular_end
            .is_some_and(|end| !end.is_reached(Instant::now(), BootTime::now()));
        Poll::Ready(match frame {
            Some(Ok(frame)) => Some(Ok(frame)),
            // Without the cause, which kube may take for a regular end.
            _ if is_early => {
                self.regular_end = None;
                self.early_ends.notify_waiters();
                Some(Err(WatchEndedEarly.into()))
            }
            Some(Err(error)) => Some(Err(error.into())),
            None => None,
        })
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl WatchLayer {
    fn reserve_start(&self, key: String) -> Instant {
        let now = Instant::now();
        let mut next_starts = self.next_starts.lock();
        next_starts.retain(|_, at| *at > now);
        let at = next_starts.get(&key).copied().unwrap_or(now);
        next_starts.insert(key, at + START_INTERVAL);
        at
    }
}

/// Returns whether the request starts a watch.
pub(super) fn is_watch(uri: &Uri) -> bool {
    let query = uri.query().unwrap_or_default();
    query.split('&').any(|part| part == "watch=true")
}

/// Returns the timeout in the request.
fn timeout(uri: &Uri) -> Option<Duration> {
    let mut parts = uri.query()?.split('&');
    let seconds = parts.find_map(|part| part.strip_prefix("timeoutSeconds="))?;
    seconds.parse().ok().map(Duration::from_secs)
}

/// Returns the resource and the selectors of a watch, without its `resourceVersion`.
fn watch_key(uri: &Uri) -> Option<String> {
    let mut selectors: Vec<&str> = uri.query()?.split('&').collect();
    selectors.retain(|part| part.contains("Selector="));
    is_watch(uri).then(|| format!("{}?{}", uri.path(), selectors.join("&")))
}

#[cfg(test)]
mod tests {
    use std::{future, io};

    use futures::StreamExt as _;
    use http::StatusCode;

    use super::*;

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn kind_and_selectors_identify_a_watch() {
        let tenants = "/apis/mesh.openkcm.io/v1alpha1/tenants";
        let first = watch_key(&uri(&format!("{tenants}?watch=true&resourceVersion=1")));
        let next = watch_key(&uri(&format!("{tenants}?watch=true&resourceVersion=2")));
        assert!(first.is_some() && first == next);
        let some = watch_key(&uri("/api/v1/secrets?&watch=true&labelSelector=a%3Db"));
        assert_ne!(some, watch_key(&uri("/api/v1/secrets?&watch=true")));
        assert_eq!(watch_key(&uri("/api/v1/secrets?limit=50")), None);
        assert_eq!(watch_key(&uri("/api/v1/secrets")), None);
    }

    fn request(uri: &str) -> Request<()> {
        Request::builder().uri(uri).body(()).unwrap()
    }

    type HttpResult = io::Result<Response<axum::body::Body>>;

    fn empty_response(_: Request<()>) -> future::Ready<HttpResult> {
        future::ready(Ok(Response::new(axum::body::Body::empty())))
    }

    #[tokio::test(start_paused = true)]
    async fn short_watches_are_throttled_and_lists_are_not() {
        let mut service = WatchLayer::default().layer(tower::service_fn(empty_response));
        let watch = || request("/api/v1/secrets?watch=true");
        let started = Instant::now();
        for number in 0..5 {
            for request in [watch(), request("/api/v1/secrets?limit=50")] {
                service.call(request).await.unwrap();
                assert_eq!(started.elapsed(), START_INTERVAL * number);
            }
        }
        // A long watch is followed immediately.
        tokio::time::advance(Duration::from_secs(290)).await;
        let again = Instant::now();
        service.call(watch()).await.unwrap();
        assert_eq!(again.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_watch_fails_after_early_end() {
        let mut service = WatchLayer::default().layer(tower::service_fn(empty_response));
        let watch = || request("/api/v1/secrets?watch=true&timeoutSeconds=290");
        let first = service.call(watch()).await.unwrap();
        let waiting = service.call(watch());
        let body = axum::body::Body::new(first.into_body());
        assert!(axum::body::to_bytes(body, 100).await.is_err());
        let ended = Instant::now();
        let result = waiting.await;
        assert!(result.is_err_and(|error| error.is::<WatchEndedEarly>()));
        assert_eq!(ended.elapsed(), Duration::ZERO);
        assert!(service.call(watch()).await.is_ok());
    }

    fn silent_response(_: Request<()>) -> future::Ready<HttpResult> {
        let silent = futures::stream::pending::<io::Result<&'static str>>();
        future::ready(Ok(Response::new(axum::body::Body::from_stream(silent))))
    }

    /// An API server that was restored from a backup sends nothing to a watch from before the backup.
    #[tokio::test(start_paused = true)]
    async fn started_watch_fails_after_early_end_elsewhere() {
        for (pause, is_failure) in [(LATE_ENDS / 2, true), (LATE_ENDS * 2, false)] {
            let layer = WatchLayer::default();
            let mut ending = layer.layer(tower::service_fn(empty_response));
            let mut silent = layer.layer(tower::service_fn(silent_response));
            let watch =
                |kind: &str| request(&format!("/api/v1/{kind}?watch=true&timeoutSeconds=290"));
            let ending = ending.call(watch("secrets")).await.unwrap().into_body();
            let silent = silent.call(watch("configmaps")).await.unwrap().into_body();
            let ending = async {
                tokio::time::sleep(pause).await;
                axum::body::to_bytes(axum::body::Body::new(ending), 100).await
            };
            let silent = axum::body::to_bytes(axum::body::Body::new(silent), 100);
            let silent = tokio::time::timeout(LATE_ENDS * 4, silent);
            let (ended, silent) = tokio::join!(ending, silent);
            assert!(ended.is_err());
            assert_eq!(matches!(silent, Ok(Err(_))), is_failure);
        }
    }

    /// Returns whether a body that sends one line and then ends `after` this time fails.
    async fn body_fails(
        status: StatusCode,
        uri: &str,
        after: Duration,
        end: Option<io::Error>,
    ) -> bool {
        let line = futures::stream::iter([Ok("line")]);
        let end = futures::stream::once(async move {
            tokio::time::sleep(after).await;
            end.map(Err)
        });
        let body = line.chain(end.filter_map(|end| async { end }));
        let mut response = Response::new(axum::body::Body::from_stream(body));
        *response.status_mut() = status;
        let response = Mutex::new(Some(response));
        let service = tower::service_fn(|_: Request<()>| {
            let response = response.lock().take();
            async { response.ok_or("called twice") }
        });
        let response = WatchLayer::default()
            .layer(service)
            .call(request(uri))
            .await;
        let body = axum::body::Body::new(response.unwrap().into_body());
        axum::body::to_bytes(body, 100).await.is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn watch_without_answer_fails_but_list_waits() {
        let service = tower::service_fn(|_: Request<()>| future::pending::<HttpResult>());
        let mut silent = WatchLayer::default().layer(service);
        let watch = silent.call(request("/api/v1/secrets?watch=true")).await;
        assert!(watch.is_err_and(|error| error.is::<WatchNotStarted>()));
        let list = silent.call(request("/api/v1/secrets?limit=50"));
        assert!(tokio::time::timeout(START_TIMEOUT * 2, list).await.is_err());
    }

    #[test]
    fn timeout_of_a_watch_includes_suspensions() {
        let (started, timeout) = (Instant::now(), Duration::from_secs(290));
        let end = RegularEnd {
            awake: started + timeout,
            boot: BootTime(timeout),
        };
        for (awake, boot, expected) in [
            (290, 290, true),
            (288, 288, false),
            (280, 290, true),
            (280, 288, false),
            (280, 300, false),
            (290, 300, true),
        ] {
            let awake_time = started + Duration::from_secs(awake);
            let boot_time = BootTime(Duration::from_secs(boot));
            let case = format!("awake for {awake} s of {boot} s");
            assert_eq!(end.is_reached(awake_time, boot_time), expected, "{case}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn watch_that_ends_before_timeout_fails() {
        const OK: StatusCode = StatusCode::OK;
        let eof = || Some(io::ErrorKind::UnexpectedEof.into());
        let watch = "/api/v1/secrets?watch=true&timeoutSeconds=290";
        let (early, late) = (Duration::from_secs(288), Duration::from_secs(290));
        assert!(body_fails(OK, watch, early, None).await);
        assert!(body_fails(OK, watch, early, eof()).await);
        assert!(body_fails(OK, watch, late, eof()).await);
        assert!(!body_fails(OK, watch, late, None).await);
        assert!(!body_fails(OK, "/api/v1/secrets?watch=true", early, None).await);
        assert!(!body_fails(StatusCode::GONE, watch, early, None).await);
        assert!(!body_fails(OK, "/api/v1/secrets?timeoutSeconds=290", early, None).await);
    }
}
