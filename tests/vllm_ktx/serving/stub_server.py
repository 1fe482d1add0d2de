"""Stands in for `vllm serve` in tests of what is around it: the same paths, streams and health, no model.

Prompts command it: `die` ends the process after the first tokens of a stream (before them, for a plain answer); `dead
engine` answers as vLLM does when its engine has died; `slow` takes 0.1 s a token; `error` is a bug of the request.
"""

import argparse
import asyncio
import json
import os

from aiohttp import web

STATE = {"requests": 0, "under_way": 0, "engine": True}


def event(text: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode()


async def health(request):
    return web.Response(status=200 if STATE["engine"] else 503)


async def metrics(request):
    args = request.app["args"]
    lines = (
        "# HELP vllm:num_requests_running Running.",
        "# TYPE vllm:num_requests_running gauge",
        f'vllm:num_requests_running{{engine="0",model_name="{args.model}"}} {STATE["under_way"]}.0',
        "# TYPE stub:requests_total counter",
        f"stub:requests_total {STATE['requests']}",
        f"vllm:kv_cache_usage_perc {args.usage}",
        f'vllm:cache_config_info{{block_size="64",num_gpu_blocks="{args.blocks}"}} 1.0',
    )
    return web.Response(text="\n".join(lines) + "\n")


async def completions(request):
    args = request.app["args"]
    if args.api_key and request.headers.get("authorization") != f"Bearer {args.api_key}":
        return web.json_response({"error": "Unauthorized"}, status=401)
    document = await request.json()
    prompt = document.get("prompt") or "".join(m["content"] for m in document.get("messages", []))
    STATE["requests"] += 1
    STATE["under_way"] += 1
    try:
        if prompt == "error":
            return web.json_response({"error": {"message": "a bug"}}, status=500)
        if "dead engine" in prompt and not os.path.exists(args.once):
            open(args.once, "w").close()
            STATE["engine"] = False
            return web.json_response({"error": {"message": "EngineDeadError"}}, status=500)
        if not document.get("stream"):
            if "slow" in prompt:
                await asyncio.sleep(1)
            if "die" in prompt and not os.path.exists(args.once):
                open(args.once, "w").close()
                os._exit(9)
            return web.json_response({"choices": [{"text": f"echo {prompt}"}], "pid": os.getpid()})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for i in range(10):
            await response.write(event(f"token {i}"))
            if "slow" in prompt:
                await asyncio.sleep(0.1)
            if "die" in prompt and i == 4:
                await asyncio.sleep(0.2)
                os._exit(9)
        await response.write(b"data: [DONE]\n\n")
        return response
    finally:
        STATE["under_way"] -= 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--api-key")
    parser.add_argument("--attention-backend")
    parser.add_argument("--once", default="/nonexistent/once", help="made by the first that dies; then nobody does")
    parser.add_argument("--usage", type=float, default=0.25, help="of the KV cache")
    parser.add_argument("--full", default="", help="the first server to make this file says that its cache is full")
    parser.add_argument("--blocks", type=int, default=1000)
    app = web.Application(client_max_size=1 << 30)
    args = app["args"] = parser.parse_args()
    if args.full:
        try:
            open(args.full, "x").close()
            args.usage = 1.0
        except FileExistsError:
            pass
    app.add_routes([web.get("/health", health), web.get("/metrics", metrics)])
    app.add_routes([web.post("/v1/completions", completions), web.post("/v1/chat/completions", completions)])
    web.run_app(app, host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main()
