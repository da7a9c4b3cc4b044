//! Connections between agents and hub. A process gets its network as a value.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::{fmt, io};

use futures::future::BoxFuture;
use http::{HeaderValue, Uri};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

use crate::admin::{self, AdminError, BindAddress};

/// Opens and accepts connections.
pub trait Network: fmt::Debug + Send + Sync {
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<Stream>>;

    /// Returns the HTTP proxy for connections to `address` (`HOST:PORT`), if there is one.
    fn proxy(&self, _address: &str) -> Option<HttpProxy> {
        None
    }

    /// Listens on `address`. Errors name `flag`.
    fn listen<'a>(
        &'a self,
        flag: &'static str,
        address: &'a BindAddress,
    ) -> BoxFuture<'a, Result<Listener, AdminError>>;
}

/// An HTTP proxy that opens connections for others.
#[derive(Clone, Debug)]
pub struct HttpProxy {
    pub uri: Uri,
    /// Value of the header Proxy-Authorization.
    pub authorization: Option<HeaderValue>,
}

/// The network of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp;

impl Network for Tcp {
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<Stream>> {
        Box::pin(async move { TcpStream::connect(address).await.map(Stream::Tcp) })
    }

    fn listen<'a>(
        &'a self,
        flag: &'static str,
        address: &'a BindAddress,
    ) -> BoxFuture<'a, Result<Listener, AdminError>> {
        Box::pin(async move { admin::bind(flag, address).await.map(Listener::Tcp) })
    }
}

/// A connection.
#[derive(Debug)]
pub enum Stream {
    Tcp(TcpStream),
    Other(Box<dyn Duplex>),
}

/// A byte stream in both directions.
pub trait Duplex: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin> Duplex for T {}

impl Stream {
    /// Sends small writes immediately instead of waiting for more data.
    ///
    /// # Errors
    /// Returns an error if the connection is closed.
    pub fn set_nodelay(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_nodelay(true),
            Self::Other(_) => Ok(()),
        }
    }

    fn pinned(self: Pin<&mut Self>) -> Pin<&mut dyn Duplex> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream),
            Self::Other(stream) => Pin::new(stream.as_mut()),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.pinned().poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.pinned().poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.pinned().poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.pinned().poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.pinned().poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Tcp(stream) => stream.is_write_vectored(),
            Self::Other(stream) => stream.is_write_vectored(),
        }
    }
}

/// Accepts connections.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Other(Box<dyn Accept>),
}

/// A source of connections.
pub trait Accept: fmt::Debug + Send + Sync {
    /// Returns the next connection and its peer. Cancel-safe.
    fn accept(&self) -> BoxFuture<'_, io::Result<(Stream, SocketAddr)>>;

    fn local_addr(&self) -> io::Result<SocketAddr>;
}

impl Listener {
    /// Returns the next connection and its peer. Cancel-safe.
    ///
    /// # Errors
    /// Returns the errors of [`TcpListener::accept`].
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                Ok((Stream::Tcp(stream), peer))
            }
            Self::Other(listener) => listener.accept().await,
        }
    }

    /// Returns the address on which it listens.
    ///
    /// # Errors
    /// Returns the errors of [`TcpListener::local_addr`].
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr(),
            Self::Other(listener) => listener.local_addr(),
        }
    }
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self::Tcp(listener)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn streams_of_both_kinds_carry_bytes() {
        let loopback = "127.0.0.1:0".parse().unwrap();
        let listener = Tcp.listen("--listen", &loopback).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (dialed, accepted) = tokio::join!(Tcp.connect(address), listener.accept());
        let (near, far) = tokio::io::duplex(64);
        let pairs = [
            (dialed.unwrap(), accepted.unwrap().0),
            (Stream::Other(Box::new(near)), Stream::Other(Box::new(far))),
        ];
        for (mut from, mut to) in pairs {
            from.set_nodelay().unwrap();
            from.write_all(b"hello").await.unwrap();
            from.shutdown().await.unwrap();
            let mut text = String::new();
            to.read_to_string(&mut text).await.unwrap();
            assert_eq!(text, "hello");
        }
    }
}
