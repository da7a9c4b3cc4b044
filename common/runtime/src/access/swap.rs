//! A client whose access can be replaced while it is in use: a rotated credential interrupts no work.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arc_swap::ArcSwap;
use http::{Request, Response};
use hyper::body::{Bytes, Frame, SizeHint};
use kube::Client;
use kube::client::Body;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tower::{BoxError, service_fn};

use crate::access::watch_requests::is_watch;

/// Replaces the access of a client. Clones share their state.
#[derive(Clone)]
pub struct SwappableClient {
    current: Arc<ArcSwap<Access>>,
}

struct Access {
    client: Client,
    replaced: CancellationToken,
}

impl std::fmt::Debug for SwappableClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Swap").finish_non_exhaustive()
    }
}

impl SwappableClient {
    /// Starts with the access of `client`.
    pub fn new(client: Client) -> Self {
        let access = Access {
            client,
            replaced: CancellationToken::new(),
        };
        Self {
            current: Arc::new(ArcSwap::from_pointee(access)),
        }
    }

    /// Returns a client that sends each request with the current access.
    ///
    /// Must be called inside a tokio runtime.
    pub fn client(&self) -> Client {
        let current = Arc::clone(&self.current);
        let namespace = current.load().client.default_namespace().to_owned();
        let service = service_fn(move |request: Request<Body>| {
            let access = current.load_full();
            async move { send(&access, request).await }
        });
        Client::new(service, namespace)
    }

    /// Sends new requests with the access of `newer`. Requests in progress keep the old access. Watches end, so their
    /// watchers reopen them.
    pub fn replace(&self, newer: &Self) {
        let access = Access {
            client: newer.current.load().client.clone(),
            replaced: CancellationToken::new(),
        };
        self.current.swap(Arc::new(access)).replaced.cancel();
    }
}

async fn send(access: &Access, request: Request<Body>) -> kube::Result<Response<UntilReplaced>> {
    let replaced = is_watch(request.uri()).then(|| access.replaced.clone());
    let response = access.client.send(request).await?;
    Ok(response.map(|inner| UntilReplaced {
        inner,
        replaced: replaced.map(|replaced| Box::pin(replaced.cancelled_owned())),
    }))
}

/// A body that ends like a timed-out watch when its access is replaced.
struct UntilReplaced {
    inner: Body,
    replaced: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

impl hyper::body::Body for UntilReplaced {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(replaced) = &mut self.replaced
            && replaced.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(None);
        }
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        Poll::Ready(frame.map(|frame| {
            frame.map_err(|error| match error {
                kube::Error::Service(error) => error,
                other => other.into(),
            })
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::api::{Api, ListParams, WatchParams};
    use tokio::sync::mpsc;

    use super::*;

    /// Responds with empty lists and silent watches, and sends its name for each request.
    fn named_client(name: &'static str, requests: mpsc::Sender<&'static str>) -> Client {
        let service = service_fn(move |request: Request<Body>| {
            requests.try_send(name).unwrap();
            let watch = is_watch(request.uri());
            async move {
                let endless = futures::stream::pending::<Result<Bytes, BoxError>>();
                let body = match watch {
                    true => axum::body::Body::from_stream(endless),
                    false => axum::body::Body::from("{\"items\":[]}"),
                };
                Ok::<_, BoxError>(Response::new(body))
            }
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn requests_follow_the_replaced_access() {
        let (request_tx, mut requests) = mpsc::channel(8);
        let swap = SwappableClient::new(named_client("old", request_tx.clone()));
        let maps: Api<ConfigMap> = Api::default_namespaced(swap.client());
        maps.list(&ListParams::default()).await.unwrap();
        assert_eq!(requests.recv().await, Some("old"));
        swap.replace(&SwappableClient::new(named_client("new", request_tx)));
        maps.list(&ListParams::default()).await.unwrap();
        assert_eq!(requests.recv().await, Some("new"));
    }

    #[tokio::test]
    async fn watches_end_when_the_access_is_replaced() {
        let (request_tx, _requests) = mpsc::channel(8);
        let swap = SwappableClient::new(named_client("old", request_tx.clone()));
        let maps: Api<ConfigMap> = Api::default_namespaced(swap.client());
        let watch = maps.watch(&WatchParams::default(), "1").await.unwrap();
        swap.replace(&SwappableClient::new(named_client("new", request_tx)));
        let events = watch.collect::<Vec<_>>().await;
        assert!(events.is_empty());
    }
}
