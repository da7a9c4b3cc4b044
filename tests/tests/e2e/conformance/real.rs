//! Runs the cases against a real API server, through the HTTP layer of a kube client.

use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::http::{Request, Response};
use futures::StreamExt;
use krypton_sim_apiserver::conformance::{Line, Opened, Server};
use kube::Client;
use tokio::runtime::Runtime;

/// No response of a case is larger.
const LIMIT: usize = 16 << 20;

pub(crate) struct RealServer<'a> {
    runtime: &'a Runtime,
    client: Client,
    watches: Vec<Option<WatchStream>>,
}

struct WatchStream {
    chunks: BodyDataStream,
    unread: Vec<u8>,
}

impl<'a> RealServer<'a> {
    pub(crate) fn new(runtime: &'a Runtime, client: Client) -> Self {
        Self {
            runtime,
            client,
            watches: Vec::new(),
        }
    }

    async fn request(
        client: &Client,
        request: Request<axum::body::Bytes>,
    ) -> Result<Response<Body>, String> {
        let request = request.map(|body| kube::client::Body::from(body.to_vec()));
        let response = client
            .send(request)
            .await
            .map_err(|error| error.to_string())?;
        Ok(response.map(Body::new))
    }

    async fn read_body(response: Response<Body>) -> Result<Response<axum::body::Bytes>, String> {
        let (parts, body) = response.into_parts();
        let bytes = axum::body::to_bytes(body, LIMIT).await;
        Ok(Response::from_parts(
            parts,
            bytes.map_err(|error| error.to_string())?,
        ))
    }
}

impl Server for RealServer<'_> {
    fn send(
        &mut self,
        request: Request<axum::body::Bytes>,
    ) -> Result<Response<axum::body::Bytes>, String> {
        self.runtime.block_on(async {
            let response = Self::request(&self.client, request).await?;
            Self::read_body(response).await
        })
    }

    fn watch(&mut self, request: Request<axum::body::Bytes>) -> Result<Opened, String> {
        let response = self
            .runtime
            .block_on(Self::request(&self.client, request))?;
        if !response.status().is_success() {
            return self
                .runtime
                .block_on(Self::read_body(response))
                .map(Opened::Rejected);
        }
        let (parts, body) = response.into_parts();
        self.watches.push(Some(WatchStream {
            chunks: body.into_data_stream(),
            unread: Vec::new(),
        }));
        Ok(Opened::Watch(
            Response::from_parts(parts, ()),
            self.watches.len() - 1,
        ))
    }

    fn next_line(&mut self, watch: usize, limit: Duration) -> Result<Line, String> {
        let Some(Some(stream)) = self.watches.get_mut(watch) else {
            return Ok(Line::End);
        };
        let next = async { tokio::time::timeout(limit, stream.line()).await };
        match self.runtime.block_on(next) {
            Ok(line) => line,
            Err(_) => Ok(Line::Silence),
        }
    }

    fn close(&mut self, watch: usize) {
        if let Some(stream) = self.watches.get_mut(watch) {
            // The stream's destructor can need the runtime.
            let _entered = self.runtime.enter();
            *stream = None;
        }
    }

    fn pass(&mut self, time: Duration) {
        self.runtime
            .block_on(async { tokio::time::sleep(time).await });
    }
}

impl WatchStream {
    async fn line(&mut self) -> Result<Line, String> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Ok(Line::Text(String::from_utf8_lossy(&line).into_owned()));
            }
            match self.chunks.next().await {
                Some(chunk) => self
                    .unread
                    .extend(chunk.map_err(|error| error.to_string())?),
                None => return Ok(Line::End),
            }
        }
    }
}
