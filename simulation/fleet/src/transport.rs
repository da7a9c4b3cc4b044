//! Connects kube's clients to simulated API servers.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::BodyExt as _;
use krypton_runtime::access::Transport;
use kube::Config;
use kube::client::{Body as ClientBody, ClientBuilder, ConfigExt as _, DynBody};
use tokio::sync::oneshot;
use tower::util::BoxService;
use tower::{BoxError, Service, ServiceBuilder};

use crate::outbox::{Body, Message, Outbox, ProcessId};

pub(crate) fn transport(
    config: Config,
    process: ProcessId,
    outbox: Outbox,
) -> Result<ClientBuilder<Transport>, kube::Error> {
    let authority = config.cluster_url.authority();
    let connection = Connection {
        authority: authority.map(ToString::to_string).unwrap_or_default(),
        process,
        outbox,
    };
    let stack = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(connection);
    let namespace = config.default_namespace.clone();
    Ok(ClientBuilder::new(BoxService::new(stack), namespace))
}

#[derive(Clone, Debug)]
struct Connection {
    authority: String,
    process: ProcessId,
    outbox: Outbox,
}

impl Service<Request<ClientBody>> for Connection {
    type Response = Response<Box<DynBody>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ClientBody>) -> Self::Future {
        let Self {
            authority,
            process,
            outbox,
        } = self.clone();
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await?.to_bytes();
            let (reply, response) = oneshot::channel();
            let handle = RequestHandle {
                id: outbox.next_id(),
                process,
                outbox,
            };
            let message = Message::Request {
                id: handle.id,
                authority,
                request: Box::new(Request::from_parts(parts, body)),
                reply,
            };
            handle.outbox.push(process, message);
            let response = response
                .await
                .map_err(|_| io::Error::from(io::ErrorKind::ConnectionReset))??;
            Ok(response.map(|body| -> Box<DynBody> { Box::new(ResponseBody { body, handle }) }))
        })
    }
}

/// The handle of a request whose response is not read to its end. Dropping it notifies the server.
#[derive(Debug)]
struct RequestHandle {
    id: u64,
    process: ProcessId,
    outbox: Outbox,
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        let message = Message::RequestDropped { id: self.id };
        self.outbox.push(self.process, message);
    }
}

#[derive(Debug)]
struct ResponseBody {
    body: Body,
    #[allow(dead_code, reason = "notifies the server when the body is dropped")]
    handle: RequestHandle,
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.body {
            Body::Complete(bytes) if bytes.is_empty() => Poll::Ready(None),
            Body::Complete(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Body::Chunks(chunks) => chunks
                .poll_recv(context)
                .map(|chunk| chunk.map(|chunk| chunk.map(Frame::data).map_err(Into::into))),
        }
    }
}
