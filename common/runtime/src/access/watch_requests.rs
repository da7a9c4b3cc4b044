//! Limits how often watches start, and makes a late start and an early end errors.
//!
//! If a server ends each watch immediately, the client retries a few times per second instead of in a tight
//! loop.
//!
//! The kube crate treats every end of a connection as the regular timeout of a watch, and resumes at the last
//! `resourceVersion`. But an API server also ends its watches when etcd is restored from a backup. The version
//! is then in the future, and the server sends nothing until it is reached. After an error, the caller lists
//! again.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::BoxFuture;
use http::{Request, Response, Uri};
use hyper::body::{Body, Frame, SizeHint};
use thiserror::Error;
use tokio::time::{Instant, sleep_until, timeout_at};
use tower::{BoxError, Layer, Service};

/// Minimum time between the starts of two watches on the same resource.
const LEAST: Duration = Duration::from_millis(500);

/// A server starts to answer a watch within this time, even if it has no event. An API server needs milliseconds.
const STARTS_WITHIN: Duration = Duration::from_secs(30);
/// A server may end a watch this much before its timeout, because clocks differ in speed.
const TOLERANCE: Duration = Duration::from_secs(1);

/// Time of the next allowed start, by resource.
type Next = Arc<Mutex<BTreeMap<String, Instant>>>;

#[derive(Clone, Debug, Default)]
pub(super) struct WatchLayer {
    next: Next,
}

impl<S> Layer<S> for WatchLayer {
    type Service = Watches<S>;

    fn layer(&self, inner: S) -> Watches<S> {
        Watches {
            inner,
            next: Arc::clone(&self.next),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Watches<S> {
    inner: S,
    next: Next,
}

impl<S, A, B> Service<Request<A>> for Watches<S>
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
        let start = watched(request.uri()).map(|what| self.turn(what));
        let timeout = timeout(request.uri());
        // The future does nothing before its first poll.
        let answer = self.inner.call(request);
        Box::pin(async move {
            let Some(start) = start else {
                let until = None;
                let response = answer.await.map_err(Into::into)?;
                return Ok(response.map(|inner| WatchBody { inner, until }));
            };
            sleep_until(start).await;
            let begun = Instant::now();
            let headed = timeout_at(begun + STARTS_WITHIN, answer).await;
            let response = headed.map_err(|_| NotStarted)?.map_err(Into::into)?;
            let watches = response.status().is_success();
            let until = timeout.filter(|_| watches).map(|timeout| begun + timeout);
            Ok(response.map(|inner| WatchBody { inner, until }))
        })
    }
}

/// The response to a watch did not start.
#[derive(Clone, Copy, Debug, Error)]
#[error("the API server did not start the watch within {} s", STARTS_WITHIN.as_secs())]
struct NotStarted;

/// The connection of a watch ended before the timeout of the watch.
#[derive(Clone, Copy, Debug, Error)]
#[error("the API server or the network ended the watch before its timeout")]
struct EndedEarly;

/// A body that fails if it ends too early.
#[derive(Debug)]
pub(super) struct WatchBody<B> {
    inner: B,
    /// Earliest regular end. `None` if any end is regular.
    until: Option<Instant>,
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
        let next = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        let early = self
            .until
            .is_some_and(|until| Instant::now() + TOLERANCE < until);
        Poll::Ready(match next {
            Some(Ok(frame)) => Some(Ok(frame)),
            // Without the cause, which kube may take for a regular end.
            _ if early => {
                self.until = None;
                Some(Err(EndedEarly.into()))
            }
            Some(Err(error)) => Some(Err(error.into())),
            None => None,
        })
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl<S> Watches<S> {
    fn turn(&self, what: String) -> Instant {
        let now = Instant::now();
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        next.retain(|_, at| *at > now);
        let at = next.get(&what).copied().unwrap_or(now);
        next.insert(what, at + LEAST);
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
fn watched(uri: &Uri) -> Option<String> {
    let query = uri.query()?;
    let mut parts: Vec<&str> = query.split('&').collect();
    let before = parts.len();
    parts.retain(|part| *part != "watch=true");
    if parts.len() == before {
        return None;
    }
    parts.retain(|part| part.contains("Selector="));
    Some(format!("{}?{}", uri.path(), parts.join("&")))
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use http::StatusCode;

    use super::*;

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn kind_and_selectors_identify_a_watch() {
        let tenants = "/apis/mesh.openkcm.io/v1alpha1/tenants";
        let first = watched(&uri(&format!("{tenants}?watch=true&resourceVersion=1")));
        let next = watched(&uri(&format!("{tenants}?watch=true&resourceVersion=2")));
        assert!(first.is_some() && first == next);
        let some = watched(&uri("/api/v1/secrets?&watch=true&labelSelector=a%3Db"));
        assert_ne!(some, watched(&uri("/api/v1/secrets?&watch=true")));
        assert_eq!(watched(&uri("/api/v1/secrets?limit=50")), None);
        assert_eq!(watched(&uri("/api/v1/secrets")), None);
    }

    fn ask(uri: &str) -> Request<()> {
        Request::builder().uri(uri).body(()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn short_watches_are_throttled_and_lists_are_not() {
        let service = tower::service_fn(|_: Request<()>| async {
            Ok::<_, std::io::Error>(Response::new(axum::body::Body::empty()))
        });
        let mut paced = WatchLayer::default().layer(service);
        let begun = Instant::now();
        for number in 0..5 {
            paced.call(ask("/api/v1/secrets?watch=true")).await.unwrap();
            assert_eq!(begun.elapsed(), LEAST * number);
            paced.call(ask("/api/v1/secrets?limit=50")).await.unwrap();
            assert_eq!(begun.elapsed(), LEAST * number);
        }
        // A long watch is followed immediately.
        tokio::time::advance(Duration::from_secs(290)).await;
        let again = Instant::now();
        paced.call(ask("/api/v1/secrets?watch=true")).await.unwrap();
        assert_eq!(again.elapsed(), Duration::ZERO);
    }

    /// Returns whether a body that sends one line and then ends `after` this time fails.
    async fn fails(uri: &str, after: Duration, end: Option<std::io::Error>) -> bool {
        fails_with(StatusCode::OK, uri, after, end).await
    }

    async fn fails_with(
        status: StatusCode,
        uri: &str,
        after: Duration,
        end: Option<std::io::Error>,
    ) -> bool {
        let line = futures::stream::iter([Ok("line")]);
        let end = futures::stream::once(async move {
            tokio::time::sleep(after).await;
            end.map(Err)
        });
        let body = line.chain(end.filter_map(|end| async { end }));
        let mut response = Response::new(axum::body::Body::from_stream(body));
        *response.status_mut() = status;
        let response = std::sync::Mutex::new(Some(response));
        let service = tower::service_fn(|_: Request<()>| {
            let response = response.lock().unwrap().take();
            async { response.ok_or("called twice") }
        });
        let response = WatchLayer::default().layer(service).call(ask(uri)).await;
        let body = axum::body::Body::new(response.unwrap().into_body());
        axum::body::to_bytes(body, 100).await.is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn watch_without_answer_fails_but_list_waits() {
        let service = tower::service_fn(|_: Request<()>| {
            std::future::pending::<Result<Response<axum::body::Body>, std::io::Error>>()
        });
        let mut silent = WatchLayer::default().layer(service);
        let watch = silent.call(ask("/api/v1/secrets?watch=true")).await;
        assert!(watch.is_err_and(|error| error.is::<NotStarted>()));
        let list = silent.call(ask("/api/v1/secrets?limit=50"));
        assert!(tokio::time::timeout(STARTS_WITHIN * 2, list).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn watch_that_ends_before_timeout_fails() {
        let eof = || Some(std::io::Error::from(std::io::ErrorKind::UnexpectedEof));
        let watch = "/api/v1/secrets?watch=true&timeoutSeconds=290";
        let (early, late) = (Duration::from_secs(288), Duration::from_secs(290));
        assert!(fails(watch, early, None).await);
        assert!(fails(watch, early, eof()).await);
        assert!(fails(watch, late, eof()).await);
        assert!(!fails(watch, late, None).await);
        assert!(!fails("/api/v1/secrets?watch=true", early, None).await);
        assert!(!fails_with(StatusCode::GONE, watch, early, None).await);
        assert!(!fails("/api/v1/secrets?timeoutSeconds=290", early, None).await);
    }
}
