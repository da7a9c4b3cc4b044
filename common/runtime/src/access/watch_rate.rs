//! Limits how often watches start.
//!
//! If a server ends each watch immediately, the client retries a few times per second instead of in a tight
//! loop. The kube crate treats such an end as the regular timeout of a watch.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use http::{Request, Uri};
use tokio::time::{Instant, sleep_until};
use tower::{Layer, Service};

/// Minimum time between the starts of two watches on the same resource.
const LEAST: Duration = Duration::from_millis(500);

/// Time of the next allowed start, by resource.
type Next = Arc<Mutex<BTreeMap<String, Instant>>>;

#[derive(Clone, Debug, Default)]
pub(super) struct PaceLayer {
    next: Next,
}

impl<S> Layer<S> for PaceLayer {
    type Service = Pace<S>;

    fn layer(&self, inner: S) -> Pace<S> {
        Pace {
            inner,
            next: Arc::clone(&self.next),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Pace<S> {
    inner: S,
    next: Next,
}

impl<S, B> Service<Request<B>> for Pace<S>
where
    S: Service<Request<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let at = watched(request.uri()).map(|what| self.turn(what));
        // The future does nothing before its first poll.
        let answer = self.inner.call(request);
        Box::pin(async move {
            if let Some(at) = at {
                sleep_until(at).await;
            }
            answer.await
        })
    }
}

impl<S> Pace<S> {
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

    #[tokio::test(start_paused = true)]
    async fn short_watches_are_throttled_and_lists_are_not() {
        let service = tower::service_fn(|_: Request<()>| async { Ok::<_, ()>(Instant::now()) });
        let mut paced = PaceLayer::default().layer(service);
        let begun = Instant::now();
        let ask = |uri: &str| Request::builder().uri(uri).body(()).unwrap();
        for number in 0..5 {
            let answered = paced.call(ask("/api/v1/secrets?watch=true")).await.unwrap();
            assert_eq!(answered - begun, LEAST * number);
            let listed = paced.call(ask("/api/v1/secrets?limit=50")).await.unwrap();
            assert_eq!(listed, answered);
        }
        // A long watch is followed immediately.
        tokio::time::advance(Duration::from_secs(290)).await;
        let again = Instant::now();
        let answered = paced.call(ask("/api/v1/secrets?watch=true")).await.unwrap();
        assert_eq!(answered, again);
    }
}
